"""``snip report RUN --live``: serves the page about a running job, rendered for each request.

The server reads the run directory, so it can run on any machine that shares the file system with the job. It listens on
the loopback address only. ``ssh -L`` forwards the page to another machine. The address contains a secret, because other
users of this machine can connect to the port too. The header ``Refresh`` makes the browser reload the page, so that the
page's security policy, which forbids network access to its scripts, stays as it is.
"""

import contextlib
import gzip
import hmac
import secrets
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from snip_megatron.precision.errors import SnipError
from snip_megatron.reporting.report import render
from snip_megatron.runtime.run_data import load_run

PORT = 8765
REFRESH_S = 15


class LiveServer:
    """A server for the page about a run. :meth:`serve` answers requests until it is interrupted or closed.

    ``port`` 0 is any free port. Raises SnipError if ``run`` is not a run directory, or the port cannot be opened.
    """

    def __init__(self, run: Path | str, port: int = PORT) -> None:
        self._run = Path(run)
        self.compressed_page()  # an error ends the command, not the first request
        self.secret = secrets.token_urlsafe(12)
        try:
            self.http = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        except (OSError, OverflowError) as error:
            raise SnipError(f"--port {port}: cannot listen ({error}); choose another one, 0 for any") from None
        self.http.daemon_threads = True  # an open connection does not keep the command from ending
        self.port = int(self.http.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}/{self.secret}/"

    def compressed_page(self) -> bytes:
        """Return the page of now, compressed by gzip. Raises SnipError if the run directory cannot be read."""
        page = render(load_run(self._run), live=True)
        return gzip.compress(page.encode("utf-8", errors="replace"), compresslevel=5)

    def serve(self) -> None:
        try:
            self.http.serve_forever()
        finally:
            self.http.server_close()

    def close(self) -> None:
        self.http.shutdown()


def _handler(server: LiveServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not hmac.compare_digest(self.path.encode(), f"/{server.secret}/".encode()):
                self._answer(404, b"There is no page here: use the address that snip report printed.\n")
                return
            try:
                self._answer(200, server.compressed_page(), "text/html", **{"Content-Encoding": "gzip"})
            except SnipError as error:
                self._answer(503, f"{error}\n".encode())

        def _answer(self, status: int, body: bytes, kind: str = "text/plain", **headers: str) -> None:
            self.send_response(status)
            headers |= {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
            headers |= {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
            if status != 404:
                headers["Refresh"] = str(REFRESH_S)
            for name, value in headers.items():
                self.send_header(name, value)
            with contextlib.suppress(ConnectionError):  # the browser has closed the connection
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing: a line for every request would hide the address."""

    return Handler

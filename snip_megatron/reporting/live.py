"""``snip report RUN --live``: serves the page about a running job, and draws it again as the run continues.

The server reads the run directory, so it can run on any machine that shares the file system with the job. It listens on
the loopback address only; ``ssh -L`` forwards the page to another machine. The address contains a secret, because other
users of this machine could connect, too. The browser reloads the page by itself (the header ``Refresh``). The page's
security policy, which forbids network access to its scripts, is not changed.
"""

from __future__ import annotations

import contextlib
import gzip
import hmac
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from snip_megatron.errors import SnipError
from snip_megatron.records.readers import CONFIG, EVENTS, METRICS
from snip_megatron.records.run_data import load_run
from snip_megatron.reporting.report import render

PORT = 8765
REFRESH_S = 15
REDRAW_S = 60


class LivePage:
    """The page about a run, as text compressed by gzip.

    It is drawn only if it is requested, and if the run has recorded something or a minute has passed since.

    Args:
        run: the run directory.
        draw: returns the page as text.
    """

    def __init__(self, run: Path, draw: Callable[[Path], str]) -> None:
        self._run = run
        self._draw = draw
        self._lock = threading.Lock()
        self._seen: object = None
        self._page = b""

    def compressed(self) -> bytes:
        """Return the page. Raises SnipError if the run directory cannot be read."""
        with self._lock:
            now = (time.time() // REDRAW_S, *(_stamp(self._run / name) for name in (CONFIG, EVENTS, METRICS)))
            if now != self._seen:
                text = self._draw(self._run)
                self._page, self._seen = gzip.compress(text.encode("utf-8", errors="replace"), compresslevel=5), now
            return self._page


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


@dataclass(frozen=True)
class LiveServer:
    """A server for the page. :meth:`serve` answers requests until it is interrupted or :meth:`close` is called."""

    http: ThreadingHTTPServer
    secret: str

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.http.server_address[1])

    @property
    def url(self) -> str:
        """The address of the page on this machine."""
        return f"http://127.0.0.1:{self.port}/{self.secret}/"

    def serve(self) -> None:
        """Answer requests."""
        try:
            self.http.serve_forever()
        finally:
            self.http.server_close()

    def close(self) -> None:
        """End :meth:`serve`, which runs in another thread."""
        self.http.shutdown()


def start(run: Path | str, cost: str | None = None, port: int = PORT) -> LiveServer:
    """Listen for requests for the page about ``run``.

    Args:
        run: the run directory.
        cost: see :func:`snip_megatron.reporting.report.write_report`.
        port: the port; 0 for any free port.

    Raises:
        SnipError: ``run`` is not a run directory, ``cost`` is not a cost model, or the port cannot be opened.
    """
    page = LivePage(Path(run), lambda path: render(load_run(path), cost, live=True))
    page.compressed()  # an error is one of the command, not of the first request
    secret = secrets.token_urlsafe(12)
    try:
        http = ThreadingHTTPServer(("127.0.0.1", port), _handler(page, f"/{secret}/"))
    except (OSError, OverflowError) as error:
        raise SnipError(f"--port {port}: cannot listen ({error}); choose another one, 0 for any") from None
    http.daemon_threads = True  # a browser that keeps its connection does not keep the command
    return LiveServer(http, secret)


def _handler(page: LivePage, path: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not hmac.compare_digest(self.path.encode(), path.encode()):
                self._answer(404, b"There is no page here: use the address that snip report printed.\n", "text/plain")
                return
            try:
                self._answer(200, page.compressed(), "text/html", compressed=True)
            except SnipError as error:
                self._answer(503, f"{error}\n".encode(), "text/plain")

        def _answer(self, status: int, body: bytes, kind: str, *, compressed: bool = False) -> None:
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")
            if compressed:
                self.send_header("Content-Encoding", "gzip")
            if status != 404:
                self.send_header("Refresh", str(REFRESH_S))
            with contextlib.suppress(ConnectionError):  # the browser has gone away
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing: a line for every request would hide the address."""

    return Handler

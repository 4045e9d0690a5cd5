"""Makes the virtual environment with the pinned dependencies, or finds that it is current and does nothing.

Standard library only: it runs on the bare interpreter that ``bootstrap.sh`` found. Three files beside the environment's
own tell its state: ``snip-stamp.json`` (complete; what it was made from), ``snip-installing`` (an install began and has
not ended: what is there cannot be trusted and is built anew) and ``snip-install.log`` (pip's words). A lock beside the
environment lets one run install while others wait; pip inherits it, so it is held while a killed run's pip still lives.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = "snip.venv/1"
INPUTS = ("constraints.txt", "setup.py")
BUILD_TOOLS = ("pip", "setuptools")


def fail(message: str) -> NoReturn:
    print(f"snip: {message}", file=sys.stderr)
    raise SystemExit(1)


def venv_directory() -> Path:
    """``SNIP_VENV``, by default ``.venv`` in the repository."""
    return Path(os.path.abspath(os.environ.get("SNIP_VENV") or ROOT / ".venv"))


def wanted_stamp(venv: Path) -> dict[str, str]:
    """What a current environment was made from: pins and requirements, interpreter, place (its scripts name it)."""
    digest = hashlib.sha256()
    for name in INPUTS:
        digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
    python = ".".join(map(str, sys.version_info[:3]))
    return {"schema": SCHEMA, "inputs": digest.hexdigest(), "python": python, "venv": str(venv), "root": str(ROOT)}


def read_stamp(venv: Path) -> dict[str, str] | None:
    """The environment's stamp; None if it has none, is damaged, or its interpreter is gone."""
    if not os.access(venv / "bin" / "python", os.X_OK):
        return None
    with contextlib.suppress(OSError, ValueError):
        stamp = json.loads((venv / "snip-stamp.json").read_text(encoding="utf-8"))
        if isinstance(stamp, dict):
            return stamp
    return None


def pins() -> dict[str, str]:
    """``name -> version`` of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(
        line.split(";")[0].strip().split("==", 1) for line in lines if "==" in line and not line.startswith("#")
    )


@contextlib.contextmanager
def locked(venv: Path) -> Iterator[int]:
    """Holds the lock beside the environment; says once that it waits. Yields the descriptor for child processes."""
    path = venv.with_name(venv.name + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"snip: another run is installing {venv}; waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


class Progress:
    """One line that says how far pip is, read from its log: rewritten on a terminal, otherwise printed now and then."""

    QUIET_INTERVAL_S = 10.0

    def __init__(self, log: Path, site_packages: Path, total: int) -> None:
        self.log, self.site_packages, self.total = log, site_packages, total
        self.start = time.monotonic()
        self.terminal = sys.stdout.isatty()
        self.printed_at = self.start

    def line(self) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        elapsed = f"{time.monotonic() - self.start:4.0f} s"
        if "Installing collected packages" in text:
            done = sum(1 for _ in self.site_packages.glob("*.dist-info"))
            return f"snip: {elapsed}  installing   {min(done, self.total)}/{self.total}"
        collected = len(re.findall(r"^Collecting ", text, re.MULTILINE))
        latest = re.findall(r"^\s+(?:Downloading|Using cached) (\S+?)-(\d\S*?)-\S+( \(.*?\))?$", text, re.MULTILINE)
        name = f"  {latest[-1][0].rsplit('/', 1)[-1]} {latest[-1][1]}{latest[-1][2]}" if latest else ""
        return f"snip: {elapsed}  downloading  {min(collected, self.total)}/{self.total}{name}"

    def show(self) -> None:
        if self.terminal:
            print(f"\r\x1b[K{self.line()[:110]}", end="", flush=True)
        elif time.monotonic() - self.printed_at >= self.QUIET_INTERVAL_S:
            self.printed_at = time.monotonic()
            print(self.line(), flush=True)

    def finish(self) -> None:
        if self.terminal:
            print("\r\x1b[K", end="", flush=True)


def run_logged(command: list[str], log: Path, lock: int, progress: Progress | None = None) -> None:
    """Runs a command with its words in the log.

    Raises:
        SystemExit: the command failed; its last lines are printed.
    """
    environment = {key: value for key, value in os.environ.items() if key not in {"PYTHONHOME", "PYTHONPATH"}}
    with log.open("a", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[lock], env=environment
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1.0)
                    break
                if progress is not None:
                    progress.show()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            if progress is not None:
                progress.finish()
    if process.returncode != 0:
        tail = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()][-15:]
        print("\n".join(tail), file=sys.stderr)
        fail(f"'{' '.join(command[1:4])} …' failed with exit code {process.returncode}; the whole log: {log}")


def install(venv: Path, lock: int) -> None:
    """Build tools, then the package with everything it needs, each at its pinned version; then pip's own check."""
    log, pinned = venv / "snip-install.log", pins()
    log.write_text("", encoding="utf-8")
    python = str(venv / "bin" / "python")
    # Byte code is left to the first import: most of what is installed is never imported.
    pip = [python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-compile"]
    tools = [f"{name}=={pinned[name]}" for name in BUILD_TOOLS if name in pinned]
    if tools:
        run_logged([*pip, *tools], log, lock)
        log.write_text("", encoding="utf-8")
    site_packages = venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    package = ["--constraint", str(ROOT / "constraints.txt"), "--no-build-isolation", "--editable", f"{ROOT}[dev]"]
    run_logged([*pip, *package], log, lock, Progress(log, site_packages, len(pinned)))
    run_logged([python, "-m", "pip", "check"], log, lock)


def make(venv: Path, wanted: dict[str, str], lock: int) -> None:
    """Brings the environment to the wanted state: in place if it is whole and of the same Python, else from nothing."""
    marker, found = venv / "snip-installing", read_stamp(venv)
    place = found or wanted  # the stamp of a copied clone names the place of its original
    if place["venv"] == str(venv) and place["root"] != str(ROOT) and Path(place["root"], "scripts").is_dir():
        fail(f"{venv} belongs to {place['root']}, which still uses it: name another place in SNIP_VENV")
    if marker.exists():
        print(f"snip: the last install of {venv} was interrupted; building it anew")
        shutil.rmtree(venv)
    elif found is not None and any(found.get(key) != wanted[key] for key in ("schema", "python", "venv", "root")):
        print(f"snip: {venv} was made for another Python or place; building it anew")
        shutil.rmtree(venv)
    elif found is None and venv.exists():
        fail(f"{venv} exists and was not made by scripts/bootstrap.sh: remove it, or name another place in SNIP_VENV")
    if not venv.exists():
        print(f"snip: making {venv} on Python {wanted['python']} ({sys.executable})", flush=True)
        venv.mkdir(parents=True)
        marker.touch()
        subprocess.run([sys.executable, "-I", "-m", "venv", str(venv)], check=True, pass_fds=[lock])
    marker.touch()
    (venv / "snip-stamp.json").unlink(missing_ok=True)
    print(
        f"snip: installing {len(pins())} pinned packages (about 5 GB on disk; log in {venv}/snip-install.log)",
        flush=True,
    )
    start = time.monotonic()
    install(venv, lock)
    temporary = venv / "snip-stamp.json.tmp"
    temporary.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
    temporary.replace(venv / "snip-stamp.json")
    marker.unlink()
    print(f"snip: installed in {time.monotonic() - start:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the virtual environment with the pinned dependencies.")
    parser.add_argument(
        "--print-venv", action="store_true", help="print where the environment is (or will be) and exit"
    )
    arguments = parser.parse_args()
    venv = venv_directory()
    if arguments.print_venv:
        print(venv)
        return 0
    wanted = wanted_stamp(venv)
    if read_stamp(venv) == wanted:
        return 0
    with locked(venv) as lock:
        if read_stamp(venv) != wanted:  # another run may have done it meanwhile
            make(venv, wanted, lock)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nsnip: interrupted; the next run repairs the environment", file=sys.stderr)
        sys.exit(130)

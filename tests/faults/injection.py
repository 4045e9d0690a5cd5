"""What kinds of faults use inside a rank: the step, the controller, signals at a random moment, and a note of it."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = 30.0
genuine_write, genuine_open = os.write, os.open  # the harness's own record must survive the faults


class Record:
    """A file of JSON lines, one write a line: what happened before a SIGKILL is there."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = genuine_open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, **fields: Any) -> None:
        genuine_write(self._descriptor, (json.dumps({"pid": os.getpid(), **fields}) + "\n").encode())


def read_record(folder: Path, name: str) -> list[dict[str, Any]]:
    """The lines of ``<name>*.jsonl`` of all ranks, a killed writer's torn last line left out."""
    lines = []
    for path in sorted(folder.glob(f"{name}*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue
    return lines


def write_json(path: Path, body: Any) -> None:
    """By rename: a campaign that is killed keeps what it has."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(body, indent=1) + "\n")
    os.replace(partial, path)


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


class Rank:
    """This rank as the faults see it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.step = -1
        self.controller: Any = None
        self.threads: list[threading.Thread] = []
        self.disk: Any = None
        self._notes = Record(folder / f"notes{self.number}.jsonl")

    @property
    def coordinator(self) -> Any:
        return None if self.controller is None else self.controller._coordinator

    @property
    def sidecar(self) -> Any:
        return None if self.coordinator is None else self.coordinator._sidecar

    def note(self, fault: int, what: str) -> None:
        """That a fault was injected, or that it ended."""
        self._notes.add(fault=fault, what=what, step=self.step, rank=self.number)

    def later(self, delay: float, action: Callable[[], None]) -> None:
        """Run ``action`` after ``delay`` seconds, whatever the training does by then."""

        def wait() -> None:
            time.sleep(delay)
            action()

        thread = threading.Thread(target=wait, name="fault", daemon=True)
        thread.start()
        self.threads.append(thread)

    def signal_sidecar(self, fault: int, number: int) -> None:
        """A signal for the solver process that is there now, or for the next one."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self.sidecar is not None:
            pid = self.sidecar.pid
            if pid is not None:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass
                else:
                    self.note(fault, "injected")
                    while number != signal.SIGSTOP and self.sidecar.pid == pid and not _has_ended(pid):
                        time.sleep(0.005)
                    return
            time.sleep(0.005)

    def settle(self) -> None:
        """Nothing injected reaches beyond the steps it is meant for."""
        for thread in self.threads:
            thread.join(PATIENCE)
        self.threads.clear()

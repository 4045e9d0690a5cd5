"""The training entry with faults, for ranks with ``FAULTS=<folder>`` that holds ``plan.json``.

The plan has ``cases`` ([moment, fault, step] each), ``delay``, and ``first`` and ``interval`` of updates. Each update
takes the next case that has not been injected, in this process or in one before it, if its step has come: several
processes one after the other, each resumed from the checkpoint of the last, go through the cases. Each rank leaves
``trace<start>-<rank>.jsonl`` there: loss and gradient norm of each step as float.hex(), and the map's codes;
``injected<rank>.jsonl``; and with ``sample_every`` ``resources<rank>.jsonl``, what the process holds every so many
steps. At the time ``until`` the training ends at its next step, as after a SIGTERM.
"""

import functools
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.table import IN_SOLVER, MOMENTS, Case

_write, _open = os.write, os.open  # the record must survive the faults


class Lines:
    """A file of JSON lines, one write a line, so that a SIGKILL loses none."""

    def __init__(self, path: Path) -> None:
        self._descriptor = _open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, **fields: Any) -> None:
        _write(self._descriptor, (json.dumps(fields) + "\n").encode())


class Rank:
    """This rank as a fault sees it."""

    def __init__(self, folder: Path, number: int, world: int) -> None:
        self.plan = plan = json.loads((folder / "plan.json").read_text())
        self.folder, self.number, self.world, self.delay = folder, number, world, plan["delay"]
        self.undo: list[Callable[[], Any]] = []  # before the next update
        self.controller: Any = None
        self.step = -1
        done = {json.loads(line)["index"] for path in folder.glob("injected*.jsonl") for line in path.open()}
        self._cases = [(i, Case(*each)) for i, (*each, _) in enumerate(plan["cases"]) if i not in done]
        self._case: tuple[int, Case] | None = None
        self._injected = Lines(folder / f"injected{number}.jsonl")
        self._leaving = False
        self._take_next() if self._cases and self._cases[0][1].moment == "start" else self._tell()

    def begin_update(self, step: int) -> None:
        """End the effects of the latest fault, and take the next case. Leave for one that needs a start or an end."""
        self.settle()
        self._case = None
        if self._cases and not self._leaving and step >= self.plan["cases"][self._cases[0][0]][2]:
            moment = self._cases[0][1].moment
            if moment != "start":
                self._take_next()
            if moment in ("start", "end"):
                self._leaving = True
                if self.number == 0:
                    os.kill(os.getpid(), signal.SIGTERM)

    def _take_next(self) -> None:
        self._case = self._cases.pop(0)
        self._tell()

    def _tell(self) -> None:
        """Tell the solver process."""
        if self.number == 0:
            index, case = self._case or (-1, Case("", ""))
            fields = {"index": index, "moment": case.moment, "fault": case.fault, "delay": self.delay}
            part = self.folder / "current.part"
            part.write_text(json.dumps(fields))
            part.replace(self.folder / "current.json")

    def take(self, moment: str) -> Case | None:
        """Return the fault that hits this rank now, at its first call of the moment."""
        if self._case is None or self._case[1].moment != moment or self._case[1].rank(self.world) != self.number:
            return None
        index, case = self._case
        if moment == "solving" and case.fault in IN_SOLVER:
            return None
        self._case = None
        self._injected.add(index=index, step=self.step, time=time.time())
        return case

    def settle(self) -> None:
        """End the effects of the latest fault."""
        while self.undo:
            self.undo.pop()()

    def write_records(self) -> None:
        self.controller._coordinator._run.writer.flush()

    def kill_solver(self) -> None:
        pid = self.controller._coordinator._sidecar.pid
        if pid is not None:
            os.kill(pid, signal.SIGKILL)


def main() -> int:
    from snip_megatron.megatron.startup import prepare
    from snip_megatron.pretrain_gpt import main as train

    prepare(sys.argv[1:], [])
    folder, number, world = Path(os.environ["FAULTS"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rank = Rank(folder, number, world)
    _follow(rank)
    for moment in MOMENTS:
        _wrap(rank, moment)
    return train()


def _wrap(rank: Rank, moment: str) -> None:
    module, _, path = MOMENTS[moment].target.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    genuine = getattr(owner, name)

    @functools.wraps(genuine)
    def call(*args: Any, **kwargs: Any) -> Any:
        if moment in ("start", "end"):
            rank.controller = args[0]
        case = rank.take(moment)
        if case is None:
            return genuine(*args, **kwargs)
        return case.inject(rank, genuine, *args, **kwargs)

    setattr(owner, name, call)


def _follow(rank: Rank) -> None:
    """Let ``rank`` know where the training is, and trace every step."""
    from snip_megatron.runtime import coordinator
    from snip_megatron.runtime.controller import Controller
    from snip_megatron.runtime.sidecar import SidecarClient

    until = rank.plan["until"]
    start = f"{os.environ['START']}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    trace = Lines(rank.folder / f"trace{start}-{rank.number}.jsonl")
    held = Lines(rank.folder / f"resources{rank.number}.jsonl")
    first, interval, every = (rank.plan[name] for name in ("first", "interval", "sample_every"))
    before_step, after_step = Controller.before_step, Controller.after_step

    def before(controller: Any, step: int, *args: Any, **kwargs: Any) -> None:
        rank.controller, rank.step = controller, step
        if step >= first and (step - first) % interval == 0:
            rank.begin_update(step)
        before_step(controller, step, *args, **kwargs)

    def after(controller: Any, step: int, loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        codes = controller._registry.current.to_codes(controller._registry.names).tobytes().hex()
        values = [None if value is None else float(value).hex() for value in (loss, grad_norm)]
        trace.add(step=step, loss=values[0], norm=values[1], map=codes)
        if every and step % every == 0 and not rank.undo:  # a disk that is stalled is not asked for its files
            writes = controller._coordinator is not None
            held.add(step=step, **resources(controller._coordinator._run.path if writes else None))
        after_step(controller, step, loss, grad_norm, *args, **kwargs)
        if until is not None and time.time() > until and rank.number == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    Controller.before_step, Controller.after_step = before, after  # type: ignore[method-assign]
    coordinator.SidecarClient = functools.partial(  # type: ignore[misc,assignment]
        SidecarClient, solve="faults.table:solve"
    )


def resources(run: Path | None) -> dict[str, int]:
    """Return what this process holds, and the size of its run directory if it writes one."""
    import torch

    pages = int(Path("/proc/self/statm").read_text().split()[1])
    sizes = [] if run is None else [file.stat().st_size for file in run.rglob("*") if file.is_file()]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "resident": pages * os.sysconf("SC_PAGESIZE"),
        "allocated": torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
        "device": torch.cuda.memory_reserved() if torch.cuda.is_available() else 0,
        "written": sum(sizes),
        "files": len(sizes),
    }


if __name__ == "__main__":
    sys.exit(main())

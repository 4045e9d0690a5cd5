"""The training entry with faults, for ranks with ``FAULTS=<folder>`` that holds ``plan.json``.

The plan has ``cases`` ([moment, fault, step] each), ``delay``, and ``first`` and ``interval`` of updates. Each update
takes the next case that has not been injected, in this process or in one before it, if its step has come: several
processes one after the other, each resumed from the checkpoint of the last, go through the cases. Each rank leaves
``trace-$START-<rank>.jsonl`` there: loss and gradient norm of each step as float.hex(), and the map's codes;
``injected<rank>.jsonl``; and with ``sample_every`` ``resources<rank>.jsonl``, what the process holds every so many
steps. At the time ``until`` the training ends at its next step, as after a SIGTERM.
"""

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rank_process import replace_target

from faults.table import IN_SOLVER, MOMENTS, Case


class Rank:
    """This rank as a fault sees it.

    Attributes:
        case: The case of this update, until it is injected, and its place in the plan.
        undo: What ends the effects of the latest fault.
    """

    def __init__(self, folder: Path, number: int, world: int) -> None:
        self.plan = json.loads((folder / "plan.json").read_text())
        self.folder, self.number, self.world, self.delay = folder, number, world, self.plan["delay"]
        self.undo: list[Callable[[], Any]] = []
        self.controller: Any = None
        self.step = -1
        self.case: tuple[int, Case] | None = None
        past = {json.loads(line)["index"] for path in folder.glob("injected*.jsonl") for line in path.open()}
        self._cases = [(i, Case(*each), step) for i, (*each, step) in enumerate(self.plan["cases"]) if i not in past]
        if self._cases and self._cases[0][1].moment == "start":
            self.case = self._cases.pop(0)[:2]

    def begin_update(self, step: int) -> None:
        """End the effects of the latest fault, and take the next case. Leave for one that needs a start or an end."""
        while self.undo:
            self.undo.pop()()
        self.case = None
        if self._cases and step >= self._cases[0][2]:
            moment = self._cases[0][1].moment
            if moment != "start":
                self.case = self._cases.pop(0)[:2]
            if moment in ("start", "end"):
                self._cases = []  # for the next process
                self.leave()

    def leave(self) -> None:
        """Let all ranks leave the training after this step."""
        if self.number == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def take(self, moment: str, *, in_solver: bool = False) -> Case | None:
        """Return the fault that hits this rank now, at its first call of the moment, or the solver process."""
        if self.case is None or self.case[1].moment != moment or self.case[1].rank(self.world) != self.number:
            return None
        index, case = self.case
        if moment == "solving" and (case.fault in IN_SOLVER) != in_solver:
            return None
        self.case = None
        self.add("injected", index=index, step=self.step, time=time.time())
        return case

    def add(self, name: str, **fields: Any) -> None:
        """Append a line to a file of this rank. A SIGKILL later on does not lose it."""
        with (self.folder / f"{name}{self.number}.jsonl").open("a") as file:
            file.write(json.dumps(fields) + "\n")

    def write_records(self) -> None:
        self.controller.coordinator.run.writer.flush()

    def kill_solver(self) -> None:
        if (pid := self.controller.coordinator._sidecar.pid) is not None:
            os.kill(pid, signal.SIGKILL)


def main() -> int:
    from snip_megatron.megatron.startup import prepare
    from snip_megatron.pretrain_gpt import main as train

    prepare(sys.argv[1:], [])
    rank = Rank(Path(os.environ["FAULTS"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    _follow(rank)
    for moment in MOMENTS:
        _wrap(rank, moment)
    return train()


def _wrap(rank: Rank, moment: str) -> None:
    def make(genuine: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if moment in ("start", "end"):
                rank.controller = args[0]
            case = rank.take(moment)
            return genuine(*args, **kwargs) if case is None else case.inject(rank, genuine, *args, **kwargs)

        return call

    replace_target(MOMENTS[moment].target, make)


def _follow(rank: Rank) -> None:
    """Let ``rank`` know where the training is, trace every step, and let the solver process have faults."""
    from snip_megatron.runtime import coordinator
    from snip_megatron.runtime.controller import Controller
    from snip_megatron.runtime.solving import SidecarClient

    first, interval, every, until = (rank.plan[name] for name in ("first", "interval", "sample_every", "until"))
    before_step, after_step = Controller.before_step, Controller.after_step

    def before(controller: Any, step: int, *args: Any, **kwargs: Any) -> None:
        rank.controller, rank.step = controller, step
        if step >= first and (step - first) % interval == 0:
            rank.begin_update(step)
        before_step(controller, step, *args, **kwargs)

    def after(controller: Any, step: int, loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        codes = controller.registry.current.to_codes(controller.registry.names).tobytes().hex()
        values = [None if value is None else float(value).hex() for value in (loss, grad_norm)]
        rank.add(f"trace-{os.environ['START']}-", step=step, rank=rank.number, values=[*values, codes])
        if every and step % every == 0 and not rank.undo:  # a disk that is stalled is not asked for its files
            rank.add("resources", step=step, **resources(controller.coordinator))
        after_step(controller, step, loss, grad_norm, *args, **kwargs)
        if until is not None and time.time() > until:
            rank.leave()

    class Client(SidecarClient):
        def submit(self, job: Any) -> None:
            if rank.case is not None and rank.case[1].moment == "solving":
                vars(job)["fault"] = (rank.case[1], rank.delay)
                rank.take("solving", in_solver=True)
            super().submit(job)

    Controller.before_step, Controller.after_step = before, after  # type: ignore[method-assign]
    coordinator.SidecarClient = functools.partial(Client, solve="faults.table:solve")  # type: ignore[misc,assignment]


def resources(coordinator: Any) -> dict[str, int]:
    """Return what this process holds, and the size of the run directory if it writes one."""
    import torch

    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = [] if coordinator is None else [path for path in coordinator.run.path.rglob("*") if path.is_file()]
    on_gpu = torch.cuda.is_available()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "resident": pages * os.sysconf("SC_PAGESIZE"),
        "allocated": torch.cuda.memory_allocated() if on_gpu else 0,
        "device": torch.cuda.memory_reserved() if on_gpu else 0,
        "written": sum(path.stat().st_size for path in files),
        "files": len(files),
    }


if __name__ == "__main__":
    sys.exit(main())

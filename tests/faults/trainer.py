"""The training entry with faults: ``python -m faults.trainer`` with ``FAULTS=<folder>`` that holds ``plan.json``.

The plan has ``faults`` (step → name in the table), ``delay``, ``settle`` (steps before which effects of faults end),
``stop_at_map``: whether training ends with the first map, and ``sample_every``: steps between two samples of resources,
0 for none. Each rank leaves ``trace<rank>.jsonl`` there: loss and gradient norm of each step as float.hex(), and the
map's codes; ``injected<rank>.jsonl``; and ``resources<rank>.jsonl``, what the process holds at the sampled steps.
"""

import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.table import FAULTS

_write, _open = os.write, os.open  # the record must survive the faults


class Lines:
    """A file of JSON lines, one write a line, so that a SIGKILL loses none."""

    def __init__(self, path: Path) -> None:
        self._descriptor = _open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, **fields: Any) -> None:
        _write(self._descriptor, (json.dumps(fields) + "\n").encode())


class Rank:
    """This rank as a fault sees it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.step = folder, -1
        self.controller: Any = None
        self.undo: list[Callable[[], Any]] = []  # before the next update
        self._threads: list[threading.Thread] = []

    @property
    def sidecar(self) -> Any:
        return self.controller._coordinator._sidecar

    @property
    def run(self) -> Any:
        return self.controller._coordinator._run

    def later(self, delay: float, action: Callable[[], Any]) -> None:
        """Run ``action`` after ``delay`` seconds, whatever the training does then."""

        def wait() -> None:
            time.sleep(delay)
            action()

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        self._threads.append(thread)

    def settle(self) -> None:
        """End the effects of the latest fault."""
        for thread in self._threads:
            thread.join()
        while self.undo:
            self.undo.pop()()


def figures(controller: Any, loss: Any, grad_norm: Any) -> dict[str, str | None]:
    """Return the loss and the gradient norm of a step to the bit, and the codes of its map."""
    registry = controller._registry
    values = [None if value is None else float(value).hex() for value in (loss, grad_norm)]
    return {"loss": values[0], "norm": values[1], "map": registry.current.to_codes(registry.names).tobytes().hex()}


def use_solver(solve: str) -> None:
    """Let the solver process call ``solve``, as ``module:function``, and be started again soon after it ends."""
    from snip_megatron.runtime import coordinator
    from snip_megatron.runtime.sidecar import SidecarClient

    coordinator.SidecarClient = functools.partial(  # type: ignore[misc,assignment]
        SidecarClient, solve=solve, restart_backoff_s=0.2
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
        "device": torch.cuda.memory_reserved() if torch.cuda.is_available() else 0,
        "written": sum(sizes),
        "files": len(sizes),
    }


def main() -> int:
    from snip_megatron.megatron.startup import prepare
    from snip_megatron.pretrain_gpt import main as train

    prepare(sys.argv[1:], [])
    folder, number, world = Path(os.environ["FAULTS"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _install(Rank(folder), folder, number, world)
    return train()


def _install(rank: Rank, folder: Path, number: int, world: int) -> None:
    from snip_megatron.runtime.controller import Controller

    plan = json.loads((folder / "plan.json").read_text())
    trace, injected = Lines(folder / f"trace{number}.jsonl"), Lines(folder / f"injected{number}.jsonl")
    held, every = Lines(folder / f"resources{number}.jsonl"), plan.get("sample_every", 0)
    before_step, after_step = Controller.before_step, Controller.after_step

    def before(controller: Any, step: int, *args: Any, **kwargs: Any) -> None:
        rank.controller, rank.step = controller, step
        if step in plan["settle"]:
            rank.settle()
        name = plan["faults"].get(str(step))
        fault = FAULTS.get(name or "")
        if fault is not None and number == fault.rank % world:
            injected.add(step=step, fault=name)
            if fault.in_rank is not None:
                fault.in_rank(rank, plan["delay"])
        before_step(controller, step, *args, **kwargs)

    def after(controller: Any, step: int, loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        trace.add(step=step, **figures(controller, loss, grad_norm))
        if every and step % every == 0 and not rank.undo:  # a disk that is stalled is not asked for its files
            coordinator = controller._coordinator
            held.add(step=step, **resources(None if coordinator is None else coordinator._run.path))
        if plan["stop_at_map"] and controller.state.precision_map is not None:
            os.kill(os.getpid(), signal.SIGTERM)
        after_step(controller, step, loss, grad_norm, *args, **kwargs)

    Controller.before_step, Controller.after_step = before, after  # type: ignore[method-assign]
    use_solver("faults.table:solve")


if __name__ == "__main__":
    sys.exit(main())

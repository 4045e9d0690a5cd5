"""The training entry in a process that trains more than once: module of warm ranks.

``CRASH=<step>``: that step (from 0) raises, and Megatron's ``pretrain`` is called again in the same process as
nvidia-resiliency-ext's in-process restart does it. ``TWICE=1``: when the entry has returned, its ``main`` is called
again. Each prints the ids of the solver processes that are left at the end.
"""

import os
import sys
from typing import Any

import torch.distributed as dist

from snip_megatron.megatron.startup import prepare
from snip_megatron.pretrain_gpt import main as train
from snip_megatron.runtime import sidecar


class CrashError(RuntimeError):
    """A fault of one step."""


def main() -> int:
    prepare(sys.argv[1:], [])
    from megatron.training import inprocess_restart

    from snip_megatron.megatron import compat

    crash, done = int(os.environ.get("CRASH", "-1")), []

    def crashing(train_step: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            if kwargs["iteration"] == crash and not done:
                done.append(True)
                raise CrashError("injected")
            return train_step(*args, **kwargs)

        return step

    def wrap(pretrain: Any) -> tuple[Any, None]:
        def run(**parameters: Any) -> Any:
            try:
                return pretrain(**parameters)
            except CrashError:
                dist.destroy_process_group()
                inprocess_restart.destroy_state()
                return pretrain(**parameters)

        return run, None

    inprocess_restart.maybe_wrap_for_inprocess_restart = wrap
    undo = compat.wrap_train_step(crashing)
    code = train()
    if os.environ.get("TWICE") and not code:
        inprocess_restart.destroy_state()
        code = train()
    undo()
    solvers = sidecar.subprocess.Popen.started  # warm_ranks.ForkedSolver
    print("solver processes left:", [solver.pid for solver in solvers if solver.poll() is None], "of", len(solvers))
    return code

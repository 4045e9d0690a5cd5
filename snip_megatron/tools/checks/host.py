"""Checks the host: CPU cores, solver, Megatron, process group, disk and shared memory."""

import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from snip_megatron.tools.checks.check import Check, attempt, fail, note, ok
from snip_megatron.tools.checks.packages import MEGATRON, admits

ROOM = "host"
_LOW_DISK = 5 * 2**30
_SHARED_MEMORY = 2 * 2**30


def check_host(directory: Path) -> Iterator[Check]:
    """Check the host, and a ``directory`` in which runs will write."""
    yield _cpus()
    yield attempt(ROOM, "solver", _solver, "reinstall the pinned ortools")
    yield attempt(ROOM, "megatron", _compatibility, f"install an unpatched {MEGATRON}")
    yield attempt(ROOM, "process group", _process_group, "check the driver and the network interface")
    yield _disk(directory)
    yield _shared_memory()


def _cpus() -> Check:
    usable = len(os.sched_getaffinity(0))
    if usable < 2:
        return note(ROOM, "cpu", f"{usable} core", "the solver process shares it with training: give rank 0 one more")
    return ok(ROOM, "cpu", f"{usable} cores")


def _solver() -> Check:
    """Solve a small problem with the solver that a run uses."""
    from snip_megatron.precision import Format
    from snip_megatron.precision.budget import Budget
    from snip_megatron.solver.api import solve
    from snip_megatron.solver.problem import Choice, Item, Problem

    precise = Choice(Format.FP8, (0.0,), 0.0)
    items = tuple(Item(str(i), 0, 1.0, (precise, Choice(Format.FP4, (1.0 + i,), 1.0))) for i in range(8))
    began = time.monotonic()
    solution = solve(Problem(items=items, budget=Budget("fp4", 0.5)))
    took = time.monotonic() - began
    chosen = sorted(item for item, fmt in solution.choices.items() if fmt is Format.FP4)
    if solution.status != "optimal" or chosen != ["0", "1", "2", "3"]:
        return fail(ROOM, "solver", f"CP-SAT answered {solution.status}: {chosen}", "reinstall the pinned ortools")
    return ok(ROOM, "solver", f"CP-SAT proved a small optimum in {took:.2f} s")


def _compatibility() -> Check:
    """Import the modules that check Megatron's version and private names."""
    from snip_megatron.megatron.startup import prepare

    prepare([], [])
    # The version is checked first, because the compat modules may fail to import with another one. The imported
    # Megatron can be a vendored copy instead of the installed package.
    import megatron.core

    if not admits(MEGATRON, megatron.core.__version__):
        return fail(ROOM, "megatron", f"{megatron.core.__version__} is imported", f"supported: {MEGATRON.specifier}")
    from snip_megatron.megatron.compat import MEGATRON_VERSION

    version = ".".join(str(part) for part in MEGATRON_VERSION)
    return ok(ROOM, "megatron", f"{version}: every private name that the step hook needs is as expected")


def _process_group() -> Check:
    """Create a process group of one rank and run a collective."""
    if importlib.util.find_spec("torch") is None:
        return fail(ROOM, "process group", "torch is not installed", "pip install torch")
    import torch

    if torch.distributed.is_initialized():
        return ok(ROOM, "process group", "in use")
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        one = torch.ones(1, device="cuda" if backend == "nccl" else "cpu")
        torch.distributed.all_reduce(one)
        torch.distributed.destroy_process_group()
    return ok(ROOM, "process group", f"{backend} works on one rank")


def _disk(directory: Path) -> Check:
    """Check the disk by creating and removing a folder.

    Permissions alone do not show whether a file system allows this (/proc).
    """
    wanted = directory.absolute()
    existing = next(path for path in (wanted, *wanted.parents) if os.path.exists(path))
    try:
        with tempfile.TemporaryDirectory(dir=existing) as folder:
            (Path(folder) / wanted.relative_to(existing)).mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(existing).free
    except OSError as error:
        found = f"no folder can be made at {wanted} ({error.strerror})"
        return fail(ROOM, "disk", found, "give --dir a directory that this user can write")
    found = f"{free / 2**30:.0f} GiB free at {existing}"
    if free < _LOW_DISK:
        return note(ROOM, "disk", found, "a checkpoint takes 14 to 18 bytes a parameter, a run directory some MB")
    return ok(ROOM, "disk", found)


def _shared_memory() -> Check:
    path = Path("/dev/shm")
    if not path.exists():
        return note(ROOM, "shared memory", "no /dev/shm", "data loader workers and NCCL use it")
    free = shutil.disk_usage(path).free
    found = f"{free / 2**30:.1f} GiB free"
    if free < _SHARED_MEMORY:
        return note(ROOM, "shared memory", found, "containers: start them with a larger --shm-size (or --ipc=host)")
    return ok(ROOM, "shared memory", found)

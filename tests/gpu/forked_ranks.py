"""Trainings with ranks forked from a process that has imported torch, Megatron, Transformer Engine and the entry.

That process touches no GPU. Where a fork of it cannot use the GPU, ranks are started as processes of their own, which
import everything again for 20 s of processor time.
"""

import functools
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from rank_process import free_port, run_as_rank

_TESTS = Path(__file__).resolve().parents[1]
REPOSITORY = _TESTS.parent
_FOLDERS = [str(REPOSITORY), str(Path(__file__).parent), str(_TESTS)]
_GRACE = 20.0  # seconds for the other ranks to end after one has failed
DETERMINISTIC = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "MAMBA_DETERMINISTIC": "1",  # read when Mamba's kernels are imported, before Megatron's own mode is set
    "UB_SKIPMC": "1",  # Transformer Engine's user buffers without multicast, which not every machine allows
}
"""Variables of all trainings. Some are read when libraries are imported."""
_PRELOADED = ("forked_ranks_imports",)


def run_ranks(
    count: int,
    module: str,
    arguments: Sequence[str],
    *,
    folder: Path,
    outputs: Sequence[tuple[Path, Path]],
    environment: Mapping[str, str],
    timeout: float,
    paths: Sequence[Path] = (),
    fresh: bool = False,
) -> list[int]:
    """Run ``main()`` of ``module`` on ranks in ``folder``, each with a file for its output and one for its errors.

    Returns the exit codes: 124 of ranks that are ended because the time is over, or because another one has failed.
    ``paths`` come first in the ranks' PYTHONPATH. With ``fresh``, or if forks cannot use the GPU, nothing is forked.
    """
    forks = not fresh and can_fork()
    folders = [*map(str, paths), *_FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])]
    common = {
        "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": os.pathsep.join(folders), **DETERMINISTIC, **environment,
    }  # fmt: skip
    ranks = []
    for rank in range(count):
        variables = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(_Rank(module, list(arguments), variables, folder, outputs[rank], forks=forks))
    deadline = time.monotonic() + timeout
    while any(rank.code() is None for rank in ranks) and time.monotonic() < deadline:
        if any(rank.code() for rank in ranks):
            deadline = min(deadline, time.monotonic() + _GRACE)
        time.sleep(0.05)
    return [rank.end() for rank in ranks]


class _Rank:
    """A rank as a process."""

    def __init__(
        self,
        module: str,
        arguments: list[str],
        environment: dict[str, str],
        folder: Path,
        outputs: tuple[Path, Path],
        *,
        forks: bool,
    ) -> None:
        self._forked: BaseProcess | None = None
        if forks:
            self._forked = _context().Process(target=_be_rank, args=(module, arguments, environment, folder, outputs))
            self._forked.start()
            return
        with outputs[0].open("ab") as out, outputs[1].open("ab") as err:
            command = [sys.executable, "-m", module, *arguments]
            self._process = subprocess.Popen(
                command, cwd=folder, env=os.environ | environment, stdout=out, stderr=err, stdin=subprocess.DEVNULL
            )

    def code(self) -> int | None:
        return self._process.poll() if self._forked is None else self._forked.exitcode

    def end(self) -> int:
        """Return the exit code. A rank that runs is killed: 124."""
        code = self.code()
        if code is None:
            process = self._process if self._forked is None else self._forked
            process.kill()
        return 124 if code is None else code


@functools.cache
def _context() -> multiprocessing.context.ForkServerContext:
    """Start the process from which ranks are forked. What it imports is in forked_ranks_imports.py."""
    os.environ |= {
        **DETERMINISTIC,
        "PYTHONPATH": os.pathsep.join([*_FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    if torch.cuda.is_available():  # asked without initialising CUDA, which must not be before a fork
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


@functools.cache
def can_fork() -> bool:
    """Return whether a fork can use the GPU. Call it first in one thread."""
    process = _context().Process(target=_use_gpu)
    process.start()
    process.join(180.0)
    if process.exitcode != 0:
        print(f"forked ranks cannot use the GPU ({process.exitcode}): ranks are started one by one", flush=True)
    return process.exitcode == 0


def _use_gpu() -> None:
    assert "snip_megatron.megatron.entry" in sys.modules  # preloaded
    if torch.cuda.is_available():
        assert torch.ones(8, device="cuda").sum().item() == 8.0
    os._exit(0)


def _be_rank(
    module: str, arguments: list[str], environment: dict[str, str], folder: Path, outputs: tuple[Path, Path]
) -> None:
    def prepare() -> None:
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # the entry sets it as the arguments need it
        os.environ |= environment
        os.chdir(folder)
        for descriptor, path in ((0, Path(os.devnull)), (1, outputs[0]), (2, outputs[1])):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
        sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)

    run_as_rank(module, arguments, prepare)

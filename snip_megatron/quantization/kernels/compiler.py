"""Compiles variants of Triton kernels in separate processes, into Triton's cache on disk.

A launch that finds its kernel in the cache takes milliseconds, where a compilation takes about a second. The processes
need no GPU. If a process dies or hangs, its kernels are compiled at their first launch.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from snip_megatron.quantization.kernels.listing import Pointer, Variant

_WORTHWHILE = 4
"""Least number of kernels for which processes are started. Starting one takes as long as compiling a few kernels."""

_PATIENCE = 120.0
"""Seconds within which some process must have compiled another kernel. All ranks wait for the slowest of them."""


@dataclass(frozen=True)
class Compilation:
    """The result of :func:`compile_variants`.

    Attributes:
        kernels: number of variants that were requested.
        compiled: number of variants that the processes compiled; 0 if the cache had all of them.
        processes: number of processes.
        left: number of variants that are compiled at their first launch, because processes died or hung.
    """

    kernels: int
    compiled: int
    processes: int
    left: int = 0


def compile_variants(
    variants: Sequence[Variant],
    target: GPUTarget,
    processes: int,
    starting: Callable[[int, int], None] = lambda kernels, processes: None,
    patience: float = _PATIENCE,
) -> Compilation:
    """Compile ``variants`` for ``target``. Nothing is done if an earlier call in any process has compiled all of them.

    Args:
        variants: the variants, from :func:`snip_megatron.quantization.kernels.listing.listed`.
        target: the target of Triton's driver.
        processes: the largest number of processes.
        starting: called with the numbers of kernels and of processes before the processes start.
        patience: seconds without a compiled kernel after which the processes are ended.
    """
    done = _done_file(variants, target)
    processes = min(processes, len(variants) // 2)
    if len(variants) < _WORTHWHILE or processes < 1 or done.exists():
        return Compilation(len(variants), 0, 0)
    starting(len(variants), processes)
    workers = [_started(target, variants[number::processes]) for number in range(processes)]
    compiled = _compiled_by(workers, patience)
    if compiled == len(variants):
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()
    return Compilation(len(variants), compiled, processes, len(variants) - compiled)


def _started(target: GPUTarget, variants: Sequence[Variant]) -> subprocess.Popen[bytes]:
    """Start a process that compiles ``variants``. It reads them from a file: a pipe to a dead one breaks."""
    # The processes must not use the GPU, where a context takes half a gigabyte.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryFile() as file:
        pickle.dump((target, variants), file)
        file.seek(0)
        return subprocess.Popen([sys.executable, "-m", __name__], stdin=file, stdout=subprocess.PIPE, env=environment)


def _compiled_by(workers: Sequence[subprocess.Popen[bytes]], patience: float) -> int:
    """Return how many kernels ``workers`` compile until they end, or until none has compiled one for ``patience``."""
    compiled = 0
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            assert worker.stdout is not None
            selector.register(worker.stdout, selectors.EVENT_READ)
        while selector.get_map() and (ready := selector.select(patience)):
            for key, _ in ready:
                found = os.read(key.fd, 4096)
                compiled += len(found)
                if not found:
                    selector.unregister(key.fileobj)
    for worker in workers:
        worker.kill()
        worker.wait()
        assert worker.stdout is not None
        worker.stdout.close()
    return compiled


def compile_variant(variant: Variant) -> None:
    """Compile one kernel for the target of Triton's active driver."""
    kernel = _kernel(variant)
    names = list(kernel.arg_names)
    arguments = [MockTensor(a.dtype) if isinstance(a, Pointer) else a for a in variant.arguments]
    if any(isinstance(a, Pointer) and not a.aligned for a in variant.arguments):
        return  # A stand-in is always aligned, so that this rare variant is compiled at its launch.
    kernel.warmup(grid=(1,), **dict(zip(names, arguments, strict=True)), **dict(variant.options))


def _kernel(variant: Variant) -> Any:
    return getattr(importlib.import_module(variant.module), variant.name)


def _done_file(variants: Sequence[Variant], target: GPUTarget) -> Path:
    """Return the path of the file whose presence in Triton's cache means that all of ``variants`` are compiled."""
    sources = {v.module + v.name: _kernel(v).cache_key for v in variants}
    asked = repr((sorted(map(repr, variants)), sorted(sources.items()), target, triton.__version__))
    return Path(triton.knobs.cache.dir) / f"snip-{hashlib.sha256(asked.encode()).hexdigest()[:32]}"


class _Target:
    """A driver for Triton that knows the target of compilations and launches nothing."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        """Return the target."""
        return self._target

    def get_current_device(self) -> int:
        """Return 0."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return 0."""
        return 0


def compile_for(target: GPUTarget) -> None:
    """Make Triton compile for ``target`` in this process. The process must not launch kernels afterwards."""
    driver.set_active(_Target(target))


def _work() -> None:
    """Compile the variants that standard input holds. Each compiled kernel writes one byte to standard output."""
    target, variants = pickle.load(sys.stdin.buffer)
    compile_for(target)
    for variant in variants:
        compile_variant(variant)
        os.write(1, b".")


if __name__ == "__main__":
    _work()

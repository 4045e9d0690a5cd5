"""Compiles variants of Triton kernels, and sources of DeepGEMM, beside the training, into Triton's cache on disk.

A launch that finds its kernel in the cache takes milliseconds, where a compilation takes up to a second. One process of
low priority imports what compilers need and forks the others. They need no GPU. If they die or hang, the kernels that
are left are compiled at their first launch.

DeepGEMM runs nvcc for 3 to 6 s in the call that first needs a kernel. A script stands in nvcc's place. While kernels
are listed, it takes the source and lets the call fail; in training it hands over what another process has compiled of
that source by then. What nobody compiled, nvcc compiles in the call.
"""

import ctypes
import hashlib
import importlib
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from snip_megatron.numerics.quantize.kernels.launch import Pointer, Source, Variant, share_cache
from snip_megatron.numerics.quantize.kernels.replay import compiled_library

# -- DeepGEMM --------------------------------------------------------------------------------------------------------
_SCRIPT = """\
#!/bin/sh
# In the place of nvcc for DeepGEMM, which runs: nvcc SOURCE -cubin -o CUBIN FLAGS...
[ "$2" = -cubin ] || exec "$SNIP_NVCC" "$@"
made="$(dirname "$0")/$(sha256sum < "$1" | cut -c 1-64).cubin"
[ -f "$made" ] && exec cp "$made" "$4"
[ -z "$SNIP_NVCC_SOURCE" ] && exec "$SNIP_NVCC" "$@"
mv "$1" "$SNIP_NVCC_SOURCE/source" && rmdir "$(dirname "$1")"
shift 4
echo "$@" > "$SNIP_NVCC_SOURCE/flags"
echo "Local memory used"
"""
_OVERRIDE, _REAL, _FOLDER, _REFUSAL = "DG_JIT_NVCC_COMPILER", "SNIP_NVCC", "SNIP_NVCC_SOURCE", "DG_JIT_PTXAS_CHECK"
"""Environment variables: of the script, of nvcc, of the folder for sources, and the one under which DeepGEMM raises,
and prints nothing, where its compiler says "Local memory used"."""


def _compile_source(source: Source) -> None:
    """Compile a source into the folder of the script, unless another process did. Nothing is left where nvcc fails."""
    folder = Path(os.environ[_OVERRIDE]).parent
    made = folder / f"{hashlib.sha256(source.code.encode()).hexdigest()}.cubin"
    if made.exists():
        return
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        file, cubin = Path(scratch, "kernel.cu"), Path(scratch, "kernel.cubin")
        file.write_text(source.code)
        command = [os.environ[_REAL], file.name, "-cubin", "-o", cubin.name, *source.flags]
        done = subprocess.run(command, cwd=scratch, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if done.returncode == 0:
            cubin.replace(made)


def take_nvcc(nvcc: str) -> None:
    """Let DeepGEMM call the script instead of ``nvcc``, before it is imported.

    Nothing changes where the script cannot run, as in a folder without the right to execute files.
    """
    script = Path(triton.knobs.cache.dir, "snip-nvcc", "nvcc")
    with suppress(OSError, subprocess.SubprocessError):
        script.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=script.parent, delete=False) as file:
            file.write(_SCRIPT)
        Path(file.name).chmod(0o755)
        Path(file.name).replace(script)
        os.environ.setdefault(_REAL, os.environ.get(_OVERRIDE) or nvcc)
        subprocess.run([script, "--version"], check=True, capture_output=True)
        os.environ[_OVERRIDE] = str(script)


def listed_source(call: Callable[[], object]) -> Source | None:
    """Return the kernel that a ``call`` of DeepGEMM needs; None if it is compiled, in which case the call runs."""
    earlier = os.environ.get(_REFUSAL)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {_FOLDER: folder, _REFUSAL: "1"}
        try:
            with suppress(Exception):  # what is wrong with the call is seen when it runs
                call()
        finally:
            del os.environ[_FOLDER], os.environ[_REFUSAL]
            if earlier is not None:
                os.environ[_REFUSAL] = earlier
        with suppress(OSError):
            return Source(Path(folder, "source").read_text(), tuple(Path(folder, "flags").read_text().split()))
    return None


# -- compilation ----------------------------------------------------------------------------------------------------
_PATIENCE = 120.0
"""Seconds within which some process must have compiled another kernel."""
_NICENESS = 10
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Compilation:
    """The compilation of ``variants`` for ``target`` by other processes.

    No process starts if an earlier one on this machine has compiled all of them.

    Args:
        variants: the variants, from :func:`snip_megatron.numerics.quantize.kernels.launch.listed`.
        target: the target of Triton's driver.
        processes: the largest number of processes.
        replays: whether the C++ extension is built as well, which launches kernels again.
        patience: seconds without a compiled kernel after which the processes are ended.

    Attributes:
        kernels: number of variants.
        processes: number of processes.
        compiled: number of variants that the processes have compiled so far.
        left: number of variants that will be compiled at their first launch; 0 while processes run.
        seconds: time from the start of the processes to their end; 0 if none was started.
    """

    def __init__(
        self,
        variants: Sequence[Variant | Source],
        target: GPUTarget,
        processes: int,
        *,
        replays: bool = False,
        patience: float = _PATIENCE,
    ) -> None:
        self.kernels, self.compiled, self.left, self.seconds = len(variants), 0, 0, 0.0
        share_cache()
        of_triton = [each for each in variants if isinstance(each, Variant)]  # a source is listed until it is compiled
        self._patience, self._done = patience, _done_file(of_triton, target, replays=replays)
        self._started = self._heard = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        done = self._done.exists() and len(of_triton) == len(variants)
        self.processes = 0 if done else max(1, min(processes, len(variants)))
        if self.processes and (variants or replays):
            self._process = _started(target, variants, self.processes, replays=replays)

    def running(self, wait: float = 0.0) -> bool:
        """Return whether the processes still compile. Waits for at most ``wait`` seconds for them to end."""
        until = time.monotonic() + wait
        while self._process is not None:
            assert self._process.stdout is not None
            now = time.monotonic()
            quiet = self._heard + self._patience
            if select.select([self._process.stdout], [], [], max(0.0, min(until, quiet) - now))[0]:
                found = os.read(self._process.stdout.fileno(), 4096)
                self.compiled, self._heard = self.compiled + len(found), time.monotonic()
                if not found:
                    self.close()
            elif time.monotonic() >= quiet:
                self.close()
            elif time.monotonic() >= until:
                return True
        return False

    def close(self) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None
        self.left, self.seconds = self.kernels - self.compiled, time.monotonic() - self._started
        if not self.left:
            self._done.parent.mkdir(parents=True, exist_ok=True)
            self._done.touch()


def _started(
    target: GPUTarget, variants: Sequence[Variant | Source], processes: int, *, replays: bool
) -> subprocess.Popen[bytes]:
    """Start the first process. It reads its task from a file: a pipe to a dead one breaks."""
    # The processes must not use the GPU, where a context takes half a gigabyte. The version of the assembler is in the
    # names of files in the cache: torch's compiler takes another assembler, while Triton remembers the first one's.
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TRITON_MOCK_PTX_VERSION": get_ptxas_version(target.arch),
    }
    with tempfile.TemporaryFile() as file:
        pickle.dump((target, list(variants), processes, replays), file)
        file.seek(0)
        return subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=file, stdout=subprocess.PIPE, env=environment,
            start_new_session=True,  # so that Ctrl-C ends the training alone, and one signal ends all of them
        )  # fmt: skip


def compile_variant(variant: Variant | Source) -> None:
    """Compile one kernel, Triton's with the C code that launches it for the target of its active driver."""
    if isinstance(variant, Source):
        _compile_source(variant)
        return
    kernel = _kernel(variant)
    names = list(kernel.arg_names)
    arguments = [MockTensor(a.dtype) if isinstance(a, Pointer) else a for a in variant.arguments]
    if any(isinstance(a, Pointer) and not a.aligned for a in variant.arguments):
        return  # A stand-in is always aligned, so that this rare variant is compiled at its launch.
    made = kernel.warmup(grid=(1,), **dict(zip(names, arguments, strict=True)), **dict(variant.options))
    with suppress(Exception):  # needs a C compiler and libcuda, without which a launch says so
        CudaLauncher(made.src, made.metadata)


def _kernel(variant: Variant) -> Any:
    return getattr(importlib.import_module(variant.module), variant.name)


def _done_file(variants: Sequence[Variant], target: GPUTarget, *, replays: bool) -> Path:
    """Return the path of the file whose presence in Triton's cache means that everything is compiled."""
    sources = {v.module + v.name: _kernel(v).cache_key for v in variants}
    asked = repr((sorted(map(repr, variants)), sorted(sources.items()), target, triton.__version__, replays))
    return Path(triton.knobs.cache.dir) / f"snip-{hashlib.sha256(asked.encode()).hexdigest()[:32]}"


def compile_for(target: GPUTarget) -> None:
    """Make Triton compile for ``target`` in this process. The process must not launch kernels afterwards."""
    answers = {"get_current_target": lambda: target, "get_current_device": lambda: 0}
    driver.set_active(SimpleNamespace(**answers, get_current_stream=lambda device: 0))


# -- the processes -------------------------------------------------------------------------------------------------
def _work() -> None:
    """Compile what standard input holds, and fork processes that do. Every kernel writes one byte to the output."""
    os.nice(_NICENESS)
    _die_with_parent()
    target, variants, processes, replays = pickle.load(sys.stdin.buffer)
    compile_for(target)
    for variant in variants:
        if isinstance(variant, Variant):
            _kernel(variant)  # imports its module before the forks
    children = [] if not replays else [_forked(lambda: compiled_library() and None)]
    children += [_forked(lambda: _compile_all(variants[n::processes])) for n in range(1, processes)]  # noqa: B023
    _compile_all(variants[::processes])
    for child in children:
        os.waitpid(child, 0)


def _forked(work: Any) -> int:
    """Run ``work`` in a fork of this process, and return its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        _die_with_parent()
        work()
        code = 0
    finally:
        os._exit(code)


def _compile_all(variants: Sequence[Variant | Source]) -> None:
    for variant in variants:
        compile_variant(variant)
        os.write(1, b".")


def _die_with_parent() -> None:
    """Let the kernel end this process with its parent, even where that is killed."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    _work()

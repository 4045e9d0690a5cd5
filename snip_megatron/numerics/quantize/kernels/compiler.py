"""Compiles kernels of Triton and of DeepGEMM beside the training, into Triton's cache on disk.

A compilation takes up to a second. A pool of processes of low priority compiles, without a GPU. If it dies or hangs,
the remaining kernels are compiled at their first launch.

DeepGEMM runs nvcc for 3 to 6 s in the call that first needs a kernel. A script takes nvcc's place. While kernels are
listed, it stores the source and lets the call fail. In training it returns what another process has compiled of that
source, or runs nvcc.
"""

import ctypes
import hashlib
import importlib
import json
import os
import pickle
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed, wait
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import driver

from snip_megatron.numerics.quantize.kernels.launch import Source, share_cache
from snip_megatron.numerics.quantize.kernels.replay import compiled_library

# -- DeepGEMM ------------------------------------------------------------------------------------------------------
_SCRIPT = """\
#!/bin/sh
# Runs instead of nvcc. DeepGEMM calls: nvcc SOURCE -cubin -o CUBIN FLAGS...
[ "$2" = -cubin ] || exec "$SNIP_NVCC" "$@"
cubin="$(dirname "$0")/$(sha256sum < "$1" | cut -c 1-64).cubin"
[ -f "$cubin" ] && exec cp "$cubin" "$4"
[ -z "$SNIP_NVCC_SOURCE" ] && exec "$SNIP_NVCC" "$@"
mv "$1" "$SNIP_NVCC_SOURCE/source" && rmdir "$(dirname "$1")"
shift 4
echo "$@" > "$SNIP_NVCC_SOURCE/flags"
echo "Local memory used"
"""
# Environment variables: the compiler that DeepGEMM calls, nvcc itself, the folder for the source of a listed kernel,
# and the one under which DeepGEMM raises, and prints nothing, if its compiler says "Local memory used".
_COMPILER, _NVCC, _SOURCE, _CHECK = "DG_JIT_NVCC_COMPILER", "SNIP_NVCC", "SNIP_NVCC_SOURCE", "DG_JIT_PTXAS_CHECK"


def replace_nvcc(nvcc: str) -> None:
    """Let DeepGEMM, not imported yet, call the script instead of ``nvcc``, if files in the cache may be executed."""
    script = Path(triton.knobs.cache.dir, "snip-nvcc", "nvcc")
    with suppress(OSError, subprocess.SubprocessError):
        script.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=script.parent, delete=False) as file:
            file.write(_SCRIPT)
        Path(file.name).chmod(0o755)
        Path(file.name).replace(script)
        os.environ.setdefault(_NVCC, os.environ.get(_COMPILER) or nvcc)
        subprocess.run([script, "--version"], check=True, capture_output=True)
        os.environ[_COMPILER] = str(script)


def missing_source(call: Callable[[], object]) -> Source | None:
    """Return the source of the kernel that a ``call`` of DeepGEMM needs. The call then does nothing.

    If the kernel has been compiled, the call runs it, and None is returned.
    """
    check = os.environ.get(_CHECK)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {_SOURCE: folder, _CHECK: "1"}
        try:
            with suppress(Exception):  # an error of the call itself is raised again when it runs
                call()
        finally:
            del os.environ[_SOURCE], os.environ[_CHECK]
            if check is not None:
                os.environ[_CHECK] = check
        with suppress(OSError):
            return Source(Path(folder, "source").read_text(), tuple(Path(folder, "flags").read_text().split()))
    return None


def _compile_source(source: Source) -> None:
    """Compile a source into the folder of the script, unless another process did. Ignores errors of nvcc."""
    folder = Path(os.environ[_COMPILER]).parent
    cubin = folder / f"{hashlib.sha256(source.code.encode()).hexdigest()}.cubin"
    if cubin.exists():
        return
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        Path(scratch, "kernel.cu").write_text(source.code)
        command = [os.environ[_NVCC], "kernel.cu", "-cubin", "-o", "kernel.cubin", *source.flags]
        process = subprocess.run(command, cwd=scratch, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if process.returncode == 0:
            Path(scratch, "kernel.cubin").replace(cubin)


# -- compilation -----------------------------------------------------------------------------------------------------
class Compilation:
    """The compilation of a listing's ``kernels`` for Triton's ``target`` by a pool of at most ``processes`` processes.

    No process starts if all kernels have been compiled on this machine before. Processes end after ``patience`` seconds
    without a compiled kernel. With ``replays``, ``replay.cpp`` is compiled as well.
    """

    def __init__(
        self,
        kernels: Sequence[str | Source],
        target: GPUTarget,
        processes: int,
        *,
        replays: bool = False,
        patience: float = 120.0,
    ) -> None:
        self.kernels, self.processes = len(kernels), 0
        self.compiled = 0  # kernels that the processes have compiled so far
        self.remaining = 0  # kernels that will be compiled at their first launch. It is 0 while processes run
        share_cache()
        self._done = _done_file([kernel for kernel in kernels if isinstance(kernel, str)], target, replays=replays)
        self._last_progress = time.monotonic()
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None
        # A source of DeepGEMM is listed only until it is compiled.
        if (kernels or replays) and (not self._done.exists() or any(isinstance(each, Source) for each in kernels)):
            self.processes = max(1, min(processes, len(kernels)))
            self._process = _start((target, list(kernels), self.processes, replays))

    def running(self, wait: float = 0.0) -> bool:
        """Return whether the processes still compile. Waits for at most ``wait`` seconds for them to end."""
        until = time.monotonic() + wait
        while self._process is not None:
            assert self._process.stdout is not None
            end = min(until, self._last_progress + self._patience)
            if select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                dots = os.read(self._process.stdout.fileno(), 4096)
                self.compiled, self._last_progress = self.compiled + len(dots), time.monotonic()
                if not dots:
                    self.close()
            elif end == until:
                return True
            else:
                self.close()
        return False

    def close(self) -> None:
        """End the processes."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._process = None
        self.remaining = self.kernels - self.compiled
        if not self.remaining:
            self._done.parent.mkdir(parents=True, exist_ok=True)
            self._done.touch()


def _done_file(kernels: Sequence[str], target: GPUTarget, *, replays: bool) -> Path:
    """Return the path of the file whose presence in Triton's cache means that everything is compiled."""
    code = sorted({_kernel(kernel).cache_key for kernel in kernels})
    identity = repr((sorted(kernels), code, target, triton.__version__, replays))
    return Path(triton.knobs.cache.dir) / f"snip-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"


def _start(task: tuple[GPUTarget, list[str | Source], int, bool]) -> subprocess.Popen[bytes]:
    """Start the process that runs :func:`_work`. It reads ``task`` from a file: a pipe to a dead process breaks."""
    # The processes must not use the GPU, where a context takes half a gigabyte. The version of the assembler is in the
    # names of files in the cache: torch's compiler takes another assembler, while Triton remembers the first one's.
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TRITON_MOCK_PTX_VERSION": get_ptxas_version(task[0].arch),
    }
    with tempfile.TemporaryFile() as file:
        pickle.dump(task, file)
        file.seek(0)
        return subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=file, stdout=subprocess.PIPE, env=environment,
            start_new_session=True,  # so that Ctrl-C ends the training alone, and one signal ends all of them
        )  # fmt: skip


def compile_for(target: GPUTarget) -> None:
    """Make Triton compile for ``target`` in this process, which must not launch kernels afterwards."""
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )


def compile_kernel(kernel: str | Source) -> None:
    """Compile a kernel for the target of Triton's driver, and the C code that launches it."""
    if isinstance(kernel, Source):
        _compile_source(kernel)
        return
    compiled = _kernel(kernel).preload(kernel)
    with suppress(Exception):  # needs a C compiler and libcuda. Without them a launch says so
        CudaLauncher(compiled.src, compiled.metadata)


def _kernel(kernel: str) -> Any:
    """Return Triton's function of a kernel."""
    module, _, function = json.loads(kernel)["name"].rpartition(".")
    return getattr(importlib.import_module(module), function)


# -- the processes -------------------------------------------------------------------------------------------------
def _work() -> None:
    """Compile the task on standard input by a pool of processes, and write a byte to standard output for each."""
    os.nice(10)
    _die_with_parent()
    target, kernels, processes, replays = pickle.load(sys.stdin.buffer)
    compile_for(target)
    for kernel in kernels:
        if isinstance(kernel, str):
            _kernel(kernel)
    random.shuffle(kernels)  # another job of this machine may compile the same ones: each finds what the other has done
    with ProcessPoolExecutor(processes + replays, get_context("fork"), _die_with_parent) as pool:
        library = [pool.submit(compiled_library)] if replays else []
        for each in as_completed([pool.submit(compile_kernel, kernel) for kernel in kernels]):
            each.result()
            os.write(1, b".")
        wait(library)


def _die_with_parent() -> None:
    """Let the operating system end this process with its parent, even if that is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    _work()

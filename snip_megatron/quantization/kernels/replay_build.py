"""Compiles ``replay.cpp`` into a cache on disk and loads it.

It needs a C++ compiler, which Triton needs as well, and the headers of Python and of torch. It needs no CUDA toolkit:
functions of libraries are called by their addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from snip_megatron.precision import Format
from snip_megatron.quantization.kernels.replay import Object, View

_SOURCE = Path(__file__).with_name("replay.cpp")
_NAME = "snip_replay"
_LAUNCH = "cuLaunchKernel"
_PATIENCE = 120.0  # seconds for the compilation by this process, and likewise by another
_CONSTANTS = (type(None), bool, str, Format, torch.dtype, functools.partial)
"""Classes of arguments of which equal values are one object. Equal values that are two objects are recorded twice."""


@functools.cache
def replay_extension(types: tuple[type, ...]) -> tuple[Any | None, str]:
    """Return the extension, configured for this process's CUDA driver, and a phrase for the log.

    The first call on a machine compiles it, which takes about 15 seconds. The extension is None if it cannot be built
    or there is no driver; the phrase then says why.

    Args:
        types: dataclasses of arguments that hold tensors.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        import triton

        found = compiled_extension()
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        return None, f"Python launches kernels ({_in_one_line(error)})"
    configure(
        found,
        launch=_address(driver, _LAUNCH),
        types=types,
        hooks=triton.knobs.runtime,
        stream=torch._C._cuda_getCurrentRawStream,
    )
    return found, "C++ launches kernels"


def configure(extension: Any, *, launch: int, types: tuple[type, ...], hooks: Any, stream: Any) -> None:
    """Tell the extension about this process.

    Args:
        extension: of :func:`compiled_extension`.
        launch: address of a function with the arguments of ``cuLaunchKernel``.
        types: dataclasses of arguments that hold tensors.
        hooks: the object whose ``launch_enter_hook`` and ``launch_exit_hook`` are Triton's; None without Triton.
        stream: returns the address of the current stream of a device.
    """
    names = {kind: tuple(field.name for field in fields(kind)) for kind in types}
    extension.configure(launch, View, Object, names, _CONSTANTS, hooks, stream)


def compiled_extension() -> Any:
    """Compile the extension, or find it in the cache, and import it.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be compiled. The message has the compiler's first error.
        ImportError: it cannot be loaded.
    """
    command = _command()
    library = _library(command)
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with _locked(library.with_suffix(".lock")):  # the processes of a node wait for the first
            if not library.exists():
                _compile(command, library)
    spec = importlib.util.spec_from_file_location(_NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _library(command: list[str]) -> Path:
    source = _SOURCE.read_text(encoding="utf-8")
    identity = "\0".join([source, torch.__version__, sys.version, platform.platform(), *command])
    return _cache() / f"{_NAME}-{hashlib.sha256(identity.encode()).hexdigest()[:32]}.so"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, or go on without it after ``_PATIENCE``: the node that held it may be gone."""
    with open(path, "w") as lock:
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
            except OSError:  # this file system has no locks
                break
        yield


def _compile(command: list[str], library: Path) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        # Commands print JSON to standard output.
        print("snip: compiling the launches of kernels in C++ ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [*command, "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=_PATIENCE)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise subprocess.SubprocessError(f"{command[0]}: {errors[0] if errors else done.returncode}")
        with contextlib.suppress(FileExistsError):  # processes of another node have loaded it: it is not replaced
            os.link(made, library)


def _command() -> list[str]:
    """Return the compiler's command without the name of its result."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise OSError("there is no C++ compiler")
    root = Path(torch.__file__).parent
    headers = [root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    libraries = root / "lib"
    return [
        *compiler.split(), "-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden",
        f"-DTORCH_EXTENSION_NAME={_NAME}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{path}" for path in headers), str(_SOURCE),
        f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_python", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip


def _cache() -> Path:
    """Return the folder of Triton's cache."""
    import triton

    return Path(triton.knobs.cache.dir)


def _address(library: Any, name: str) -> int:
    return int(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0)


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]

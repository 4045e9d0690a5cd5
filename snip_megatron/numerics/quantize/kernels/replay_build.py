"""Compiles ``replay.cpp`` into a cache on disk and loads it.

It needs a C++ compiler, which Triton needs as well, and the headers of Python and of torch. It needs no CUDA toolkit:
functions of libraries are called by their addresses.
"""

import contextlib
import ctypes
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
from pathlib import Path
from typing import Any

import torch

from snip_megatron.numerics.quantize.kernels.replay import launcher
from snip_megatron.precision import Format, Gemm

_SOURCE = Path(__file__).with_name("replay.cpp")
_NAME = "snip_replay"
_PATIENCE = 120.0  # seconds for the compilation
CONSTANTS = (type(None), bool, str, Format, Gemm, torch.dtype, type(...), functools.partial)
"""Classes of arguments of which equal values are one object. Equal values that are two objects are recorded twice."""


@functools.cache
def replay_extension() -> tuple[Any | None, str]:
    """Return the extension, configured for this process's CUDA driver, and a phrase for the log.

    The first call on a machine compiles it, which takes about 15 seconds. The extension is None if it cannot be built
    or there is no driver; the phrase then says why.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        found = compiled_extension()
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        return None, f"Python launches kernels ({' '.join(str(error).split())[:200]})"
    launcher(int(ctypes.cast(driver.cuLaunchKernel, ctypes.c_void_p).value or 0))
    found.configure(CONSTANTS, torch._C._cuda_getCurrentRawStream)
    return found, "C++ launches kernels"


def compiled_extension() -> Any:
    """Import the extension that :func:`compiled_library` returns. Raises ImportError if it cannot be loaded."""
    spec = importlib.util.spec_from_file_location(_NAME, compiled_library())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled_library() -> Path:
    """Return the path of the extension in the cache, which is compiled if it is not there.

    Processes of a node may compile it side by side. If it cannot be compiled, OSError or subprocess.SubprocessError has
    the compiler's first error.
    """
    import triton

    command = _command()
    identity = "\0".join(
        [_SOURCE.read_text(encoding="utf-8"), torch.__version__, sys.version, platform.platform(), *command]
    )
    library = Path(triton.knobs.cache.dir) / f"{_NAME}-{hashlib.sha256(identity.encode()).hexdigest()[:32]}.so"
    if not library.exists():
        _compile(command, library)
    return library


def _compile(command: list[str], library: Path) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        # Commands print JSON to standard output.
        print("snip: compiling the launches of kernels in C++ ...", file=sys.stderr, flush=True)
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [*command, "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=_PATIENCE)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise subprocess.SubprocessError(f"{command[0]}: {errors[0] if errors else done.returncode}")
        with contextlib.suppress(FileExistsError):  # another process was faster, and may have loaded it
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

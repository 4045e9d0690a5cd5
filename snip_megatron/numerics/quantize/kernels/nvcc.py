"""Lists and compiles the kernels of DeepGEMM beside those of Triton.

DeepGEMM runs nvcc for 3 to 6 s in the call that first needs a kernel. A script stands in nvcc's place. While kernels
are listed, it takes the source and lets the call fail; in training it hands over what another process has compiled of
that source by then. What nobody compiled, nvcc compiles in the call.
"""

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import triton

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


@dataclass(frozen=True)
class Source:
    """The source of a kernel, and the flags of nvcc."""

    code: str
    flags: tuple[str, ...]

    def compile(self) -> None:
        """Compile it into the folder of the script, unless another process did. Nothing is left where nvcc fails."""
        folder = Path(os.environ[_OVERRIDE]).parent
        made = folder / f"{hashlib.sha256(self.code.encode()).hexdigest()}.cubin"
        if made.exists():
            return
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            source, cubin = Path(scratch, "kernel.cu"), Path(scratch, "kernel.cubin")
            source.write_text(self.code)
            command = [os.environ[_REAL], source.name, "-cubin", "-o", cubin.name, *self.flags]
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

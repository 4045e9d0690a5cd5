"""Processes compile the kernels of Triton that a listing holds into the cache that launches read.

Those of DeepGEMM, by the real nvcc: tests/gpu/test_grouped_gpu.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
from triton.backends.compiler import GPUTarget

from snip_megatron.numerics.quantize.kernels.compiler import Compilation
from snip_megatron.numerics.quantize.kernels.launch import share_cache


def test_ranks_of_a_host_share_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's compiler would give each device its own, in which only this rank's share of the kernels is compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert triton_cache_dir(0) != triton_cache_dir(1)
    share_cache()
    assert triton_cache_dir(0) == triton_cache_dir(1) == triton.knobs.cache.dir


TRITON = """
import json, pathlib, os, torch, triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas_version
from snip_megatron.numerics.quantize.kernels.compiler import Compilation, compile_for
from snip_megatron.numerics.quantize.kernels.launch import list_launches
from snip_megatron.sensitivity import sums
from snip_megatron.sensitivity.sums import weight_sums
sums.has_kernels = lambda x: True
target = GPUTarget("cuda", 90, 32)
compile_for(target)
def run():
    for size in (16, 17, 33):
        weight_sums(torch.zeros(size, size), ("fp8",))
        weight_sums(torch.zeros(size, size, dtype=torch.bfloat16), ("fp8",))
with list_launches() as listing:
    run()
get_ptxas_version(90)
if os.path.exists(assembler := os.path.dirname(torch.__file__) + "/bin/ptxas"):
    os.environ["TRITON_PTXAS_PATH"] = assembler
kernels = list(listing.kernels)
assert len(kernels) == 4, kernels
counts = []
for _ in range(2):
    made = Compilation(kernels, target, 2)
    made.running(wait=400.0)
    counts.append([made.kernels, made.compiled, made.processes, made.remaining])
cubins = lambda: len(list(pathlib.Path(os.environ["TRITON_HOME"]).rglob("*.cubin")))
os.environ.setdefault("TRITON_CACHE_DIR", os.environ["TRITON_HOME"] + "/inductor")
counts.append(cubins())
with list_launches() as again:
    triton.knobs.runtime.jit_cache_hook = None  # this process compiles now what its launches need
    run()
print(json.dumps([*counts, cubins(), len(again.kernels)]))
"""


def test_processes_compile_what_launches_read_and_a_second_call_starts_none(tmp_path: Path) -> None:
    """It needs its own process, since torch's compiler sets another assembler before, and moves the cache after."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR"}
    process = subprocess.run(
        [sys.executable, "-c", TRITON], capture_output=True, text=True, check=False, timeout=500,
        env=inherited | {"TRITON_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    first, second, before, after, listed = json.loads(process.stdout.splitlines()[-1])
    assert first == [4, 4, 2, 0]
    assert second == [4, 0, 0, 0]
    assert before == after == 4  # every key under which this process looks for a kernel was there
    assert listed == 0


FAULTY = """
import os, sys, time, triton
if getattr(sys.modules["__main__"].__spec__, "name", "").endswith("compiler"):
    {fault}
@triton.jit
def kernel(x): pass
"""


@pytest.mark.parametrize("fault", ["os._exit(1)", "time.sleep(300)"])
def test_processes_that_die_or_hang_are_noticed(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY.format(fault=fault))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    kernels, target = [json.dumps({"name": "faulty.kernel", "key": n}) for n in range(4)], GPUTarget("cuda", 90, 32)
    result = Compilation(kernels, target, 2, patience=60.0 if "exit" in fault else 1.0)
    assert result.running()  # the training goes on beside it
    assert not result.running(wait=120.0)
    assert (result.compiled, result.processes, result.remaining) == (0, 2, 4)
    again = Compilation(kernels, target, 2)  # they do not count as compiled
    assert again.running()
    again.close()
    assert not again.running()

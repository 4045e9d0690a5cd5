"""Processes compile the kernels that a listing holds, of Triton and of DeepGEMM, into the cache that launches read."""

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


def run_alone(code: str, **variables: str) -> str:
    """Run Python code in a process with another environment, and return the last line of its output."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("DG_JIT", "SNIP_NVCC", "TRITON_CACHE_DIR"))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=500,
        env=inherited | variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


TRITON = """
import json, pathlib, os, torch, triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas_version
from snip_megatron.numerics.quantize.kernels.compiler import Compilation, compile_for
from snip_megatron.numerics.quantize.kernels.launch import list_launches
from snip_megatron.sensitivity import sums
from snip_megatron.sensitivity.sums import output_sums, sum_squares
sums.has_kernels = lambda x: True
target = GPUTarget("cuda", 90, 32)
compile_for(target)
def run():
    for size in (8, 16):
        sum_squares(torch.zeros(size + 1))
        sum_squares(torch.zeros(size, dtype=torch.bfloat16))
    output_sums(torch.zeros(16, 32), torch.zeros(16, 32), torch.zeros(16, 32))
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
    """In a process of its own: torch's compiler takes another assembler before, and moves the cache afterwards."""
    found = json.loads(run_alone(TRITON, TRITON_HOME=str(tmp_path), CUDA_VISIBLE_DEVICES=""))
    first, second, before, after, listed = found
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
    found = Compilation(kernels, target, 2, patience=60.0 if "exit" in fault else 1.0)
    assert found.running()  # the training goes on beside it
    assert not found.running(wait=120.0)
    assert (found.compiled, found.processes, found.remaining) == (0, 2, 4)
    again = Compilation(kernels, target, 2)  # they do not count as compiled
    assert again.running()
    again.close()
    assert not again.running()


# -- DeepGEMM --------------------------------------------------------------------------------------
NVCC = """#!/bin/sh
echo "$@" >> {log}
[ "$1" = --version ] && exec echo release 13.0
cat "$1" - < /dev/null > "$4"
"""
LIBRARY = '''
import os, pathlib, shutil, subprocess, tempfile
compiler = os.environ["DG_JIT_NVCC_COMPILER"]
subprocess.run([compiler, "--version"], check=True, capture_output=True)
def product(a, b, out, experts, disable_ue8m0_cast):
    """What DeepGEMM 0.1.4 does: a source for N, K and experts in a folder of its own, nvcc, the cache, a launch."""
    assert a[1].stride() == (1, len(a[0])) and len(out) == len(experts) == len(a[0])
    cache = pathlib.Path(os.environ["TRITON_CACHE_DIR"], f"deepgemm-{tuple(b[0].shape)}")
    if not cache.exists():
        folder = tempfile.mkdtemp()
        source, cubin = folder + "/kernel.cu", folder + "/kernel.cubin"
        pathlib.Path(source).write_text(f"kernel of {tuple(b[0].shape)}")
        command = f"{compiler} {source} -cubin -o {cubin} -O3 -arch=sm_90a"
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        assert done.returncode == 0
        assert not (os.environ.get("DG_JIT_PTXAS_CHECK") and "Local memory used" in done.stdout)
        cache.write_text(pathlib.Path(cubin).read_text())
        shutil.rmtree(folder)
    launched.append(cache.read_text())
launched = []
'''
TRAINING = """
import json, torch
from triton.backends.compiler import GPUTarget
from snip_megatron.numerics.quantize.kernels.compiler import replace_nvcc
replace_nvcc({nvcc!r})
exec({library!r})
from snip_megatron.numerics.products.deepgemm import run
from snip_megatron.numerics.quantize.kernels.compiler import Compilation
from snip_megatron.numerics.quantize.kernels.launch import list_launches
def call(n, rows=256):
    a, b = (torch.zeros(rows, 256), torch.zeros(2, rows).t()), (torch.zeros(2, n, 256), torch.zeros(2, n // 128, 2))
    run(product, a, b, torch.zeros(rows, n), torch.zeros(rows, dtype=torch.int32))
calls = lambda: pathlib.Path({log!r}).read_text().count("-cubin")
with list_launches() as listing:
    [call(n) for n in (128, 384, 128)]
sources = list(listing.kernels)
assert not launched and sources[0].flags == ("-O3", "-arch=sm_90a")
compiled = Compilation(sources, GPUTarget("cuda", 90, 32), 2)
assert not compiled.running(wait=300.0) and (compiled.compiled, compiled.remaining) == (2, 0)
[call(n) for n in (128, 384)]
assert calls() == 2  # of the other process
call(640)  # nobody has listed it
assert calls() == 3
with list_launches() as again:
    call(128)
assert not again.kernels  # compiled: DeepGEMM runs
print(json.dumps([[each.code for each in sources], launched]))
"""


def test_a_listed_kernel_is_compiled_by_another_process_and_the_call_runs_no_nvcc(tmp_path: Path) -> None:
    nvcc, log = tmp_path / "nvcc", tmp_path / "log"
    nvcc.write_text(NVCC.format(log=log))
    nvcc.chmod(0o755)
    code = TRAINING.format(nvcc=str(nvcc), library=LIBRARY, log=str(log))
    kernels = [f"kernel of (2, {n}, 256)" for n in (128, 384, 640)]
    found = json.loads(run_alone(code, TRITON_CACHE_DIR=str(tmp_path / "cache")))
    assert found == [kernels[:2], [*kernels, kernels[0]]]

"""What DeepGEMM asks of nvcc: listed without a compilation, compiled elsewhere, and taken when it is asked again."""

import json
import os
import subprocess
import sys
from pathlib import Path

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
from snip_megatron.numerics.quantize.kernels.compiler import take_nvcc
take_nvcc({nvcc!r})
exec({library!r})
from snip_megatron.numerics.products.deepgemm import run
from snip_megatron.numerics.quantize.kernels.compiler import Compilation
from snip_megatron.numerics.quantize.kernels.launch import listed
def call(n, rows=256):
    a, b = (torch.zeros(rows, 256), torch.zeros(2, rows).t()), (torch.zeros(2, n, 256), torch.zeros(2, n // 128, 2))
    run(product, a, b, torch.zeros(rows, n), torch.zeros(rows, dtype=torch.int32))
calls = lambda: pathlib.Path({log!r}).read_text().count("-cubin")
with listed() as listing:
    [call(n) for n in (128, 384, 128)]
sources = list(listing.variants)
assert not launched and sources[0].flags == ("-O3", "-arch=sm_90a")
compiled = Compilation(sources, GPUTarget("cuda", 90, 32), 2)
assert not compiled.running(wait=300.0) and (compiled.compiled, compiled.left) == (2, 0)
[call(n) for n in (128, 384)]
assert calls() == 2  # of the other process
call(640)  # nobody has listed it
assert calls() == 3
with listed() as again:
    call(128)
assert not again.variants  # compiled: DeepGEMM runs
print(json.dumps([[each.code for each in sources], launched]))
"""


def test_a_listed_kernel_is_compiled_by_another_process_and_the_call_runs_no_nvcc(tmp_path: Path) -> None:
    nvcc, log = tmp_path / "nvcc", tmp_path / "log"
    nvcc.write_text(NVCC.format(log=log))
    nvcc.chmod(0o755)
    code = TRAINING.format(nvcc=str(nvcc), library=LIBRARY, log=str(log))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DG_JIT", "SNIP_NVCC"))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300,
        env={**kept, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [f"kernel of (2, {n}, 256)" for n in (128, 384, 640)]
    assert json.loads(done.stdout) == [kernels[:2], [*kernels, kernels[0]]]

"""Listed launches: what Triton tells apart is apart, what it treats alike is one; processes compile what is listed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
from triton.backends.compiler import GPUTarget

from snip_megatron.numerics.quantize.kernels import swiglu
from snip_megatron.numerics.quantize.kernels.compiler import Compilation
from snip_megatron.numerics.quantize.kernels.launch import Variant, listed, share_cache
from snip_megatron.numerics.quantize.kernels.quantize import quantize_operands
from snip_megatron.numerics.quantize.operands import OperandSpec
from snip_megatron.precision import Format

HOPPER = GPUTarget("cuda", 90, 32)


@triton.jit(do_not_specialize=["counter"])
def kernel(x_ptr, size, counter, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at) * scale + counter, mask=at < size)


def memory(dtype: torch.dtype = torch.float32, *, aligned: bool = True) -> torch.Tensor:
    whole = torch.zeros(64, dtype=dtype)
    first = (-whole.data_ptr() % 16) // whole.element_size()
    return whole[first if aligned else first + 1 :]


def variant(x: torch.Tensor, size: int, counter: int, scale: float, block: int = 32, **options: Any) -> Variant:
    return Variant.of(kernel, (x, size), {"counter": counter, "scale": scale, "BLOCK": block, **options})


def test_what_triton_treats_alike_is_one_variant() -> None:
    one = variant(memory(), 32, 5, 0.5, num_warps=4)
    assert one == variant(memory(), 4096, 16, 3.25, num_warps=4)
    assert hash(one) == hash(variant(memory(), 4096, 1, 3.25, num_warps=4))


@pytest.mark.parametrize(
    "other",
    [
        lambda: variant(memory(aligned=False), 32, 5, 0.5),
        lambda: variant(memory(torch.bfloat16), 32, 5, 0.5),
        lambda: variant(memory(), 33, 5, 0.5),
        lambda: variant(memory(), 1, 5, 0.5),
        lambda: variant(memory(), 1 << 36, 5, 0.5),
        lambda: variant(memory(), 32, 1 << 36, 0.5),
        lambda: variant(memory(), 32, 5, 0.5, block=64),
        lambda: variant(memory(), 32, 5, 0.5, num_warps=8),
    ],
)
def test_what_triton_tells_apart_is_another_variant(other: Any) -> None:
    assert other() != variant(memory(), 32, 5, 0.5)


def test_a_single_row_runs_no_kernel() -> None:
    """ptxas miscompiles it (``reads_words``). On a GPU: test_wgrad_reads_nothing_beside_its_operands."""
    x = torch.zeros(1, 512, dtype=torch.bfloat16)
    with listed() as listing:
        for fmt, weight in ((Format.FP8, False), (Format.FP8, True), (Format.FP8_TENSOR, False)):
            quantize_operands(x, OperandSpec(fmt, fmt, weight=weight))
    assert not listing.variants
    assert not swiglu.fits(x)
    assert swiglu.fits(x.expand(2, 512))


def test_ranks_of_a_host_share_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's compiler would give each device its own, in which only this rank's share of the kernels is compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert triton_cache_dir(0) != triton_cache_dir(1)
    share_cache()
    assert triton_cache_dir(0) == triton_cache_dir(1) == triton.knobs.cache.dir


def test_a_machine_without_triton_has_no_cache_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # its import fails
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    share_cache()
    assert "TRITON_CACHE_DIR" not in os.environ


def test_processes_compile_into_the_cache_and_a_second_call_starts_none(tmp_path: Path) -> None:
    """In a process of its own: torch's compiler takes another assembler before, and moves the cache afterwards. What a
    launch would compile then is in the cache: its key is one that the processes have written."""
    without = {name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILES], capture_output=True, text=True, check=False, timeout=500,
        env={**without, "TRITON_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["first"] == [4, 4, 2, 0]
    assert found["second"] == [4, 0, 0, 0]
    assert found["cubins"] == [4, 4]  # before and after this process has asked for the same kernels


@pytest.mark.parametrize("fault", ["os._exit(1)", "time.sleep(300)"])
def test_processes_that_die_or_hang_are_noticed(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faulty.py").write_text(_FAULTY.format(fault=fault))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    variants = [Variant("faulty", "kernel", (number,), ()) for number in range(4)]
    found = Compilation(variants, HOPPER, 2, patience=60.0 if "exit" in fault else 1.0)
    assert found.running()  # the training goes on beside it
    assert not found.running(wait=120.0)
    assert (found.compiled, found.processes, found.left) == (0, 2, 4)
    again = Compilation(variants, HOPPER, 2, patience=60.0)  # they do not count as compiled
    assert again.running()
    again.close()
    assert not again.running()


_FAULTY = """
import os, sys, time, triton
if getattr(sys.modules["__main__"].__spec__, "name", "").endswith("compiler"):
    {fault}
@triton.jit
def kernel(x): pass
"""

_COMPILES = """
import json, pathlib, os, torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas_version
from snip_megatron.numerics.quantize.kernels.compiler import Compilation, compile_for, compile_variant
from snip_megatron.numerics.quantize.kernels.launch import listed
from snip_megatron.sensitivity import sums
from snip_megatron.sensitivity.sums import output_sums, sum_squares
sums.has_kernels = lambda x: True
with listed() as listing:
    for size in (8, 16):
        sum_squares(torch.zeros(size + 1))
        sum_squares(torch.zeros(size, dtype=torch.bfloat16))
    output_sums(torch.zeros(16, 32), torch.zeros(16, 32), torch.zeros(16, 32))
target = GPUTarget("cuda", 90, 32)
get_ptxas_version(90)
if os.path.exists(assembler := os.path.dirname(torch.__file__) + "/bin/ptxas"):
    os.environ["TRITON_PTXAS_PATH"] = assembler
variants = list(listing.variants)
assert len(variants) == 4, variants
found = {}
for name in ("first", "second"):
    made = Compilation(variants, target, 2)
    made.running(wait=400.0)
    found[name] = [made.kernels, made.compiled, made.processes, made.left]
cubins = lambda: len(list(pathlib.Path(os.environ["TRITON_HOME"]).rglob("*.cubin")))
os.environ.setdefault("TRITON_CACHE_DIR", os.environ["TRITON_HOME"] + "/inductor")
before = cubins()
compile_for(target)
for variant in variants:
    compile_variant(variant)
print(json.dumps(found | {"cubins": [before, cubins()]}))
"""

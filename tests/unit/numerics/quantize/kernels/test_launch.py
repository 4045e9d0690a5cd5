"""Launches pass arguments by position: first memory, then numbers, then constants, in the order of the parameters."""

import json
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from snip_megatron.numerics.products.grouped import group_rows
from snip_megatron.numerics.quantize.device_keys import DeviceKeys, LinearIdentity
from snip_megatron.numerics.quantize.kernels import exact, launch, partial_sums, quantize, swiglu
from snip_megatron.numerics.quantize.kernels.compiler import compile_for
from snip_megatron.numerics.quantize.reference import Rotation

from ..specs import spec

X = torch.zeros(256, 512, dtype=torch.bfloat16)
PROBS = torch.zeros(256)


def run_all_kernels() -> None:
    rows = group_rows((3, 0, 200), torch.device("cpu"))
    keys = DeviceKeys([LinearIdentity(0, 1, 0)], (1, 2), torch.device("cpu"))
    drawn = spec("fp4", "fp4", row_seed=1, col_seed=2)
    for how in (spec("fp8", "fp4"), drawn, spec("fp8_tensor", "fp8"), spec("fp8", "fp4", weight=True)):
        quantize.quantize_operands(X, how)
    for how in (spec("fp8", "fp4"), drawn):
        quantize.quantize_operands(X[:203], how, None, rows.map)
        swiglu.quantize_swiglu(X, how, PROBS)
        swiglu.quantize_swiglu_gradient(X[:, :256].contiguous(), X, how, PROBS)
    quantize.quantize_group_blocks(X.view(2, 128, 512), spec("fp8", "fp4", weight=True))
    quantize.unpad(rows.map, quantize.pad(rows.map, X[:203]), 203)
    quantize.advance(keys._state, keys._counts, keys._identities, keys._words, 0, (1, 2))
    swiglu.swiglu_with_amax(X)
    swiglu.swiglu_with_amax(X, X[:, :256].contiguous())
    exact.quantize_exact(X, spec("nvfp4_46", "nvfp4_hadamard", col_seed=1, rotation=Rotation(3)))
    partial_sums.add_partials(torch.zeros(2, 4, 256, dtype=torch.uint8), torch.zeros(2, 4, 2), X[:4, :256], 0)


def test_arguments_have_the_order_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def check(kernel: Any, grid: Any, memory: Any, numbers: Any, counters: Any, constants: Any, options: Any) -> None:
        names = kernel.arg_names
        pointers, scalars = len(memory), len(numbers) + len(counters)
        assert all(name.endswith("_ptr") for name in names[:pointers])
        assert names[pointers + scalars :] == list(constants)
        plain = {name for name in names if kernel.params[names.index(name)].do_not_specialize}
        if plain:
            assert set(names[pointers + len(numbers) : pointers + scalars]) == plain
        seen.add(kernel.fn.__name__)
        launch.launch(kernel, grid, memory, numbers, counters, constants, options)

    monkeypatch.setattr(driver, "_active", None)
    compile_for(GPUTarget("cuda", 90, 32))
    for module in (exact, partial_sums, quantize, swiglu):
        monkeypatch.setattr(module, "launch", check)
    with launch.list_launches() as listing:
        run_all_kernels()
    assert len(seen) == 13
    assert len(listing.kernels) > len(seen)


def test_multiplications_and_additions_are_fused_whatever_tritons_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")  # the default of Triton 3.10
    monkeypatch.setattr(driver, "_active", None)
    compile_for(GPUTarget("cuda", 90, 32))
    with launch.list_launches() as listing:
        quantize.quantize_operands(X, spec("fp8", "fp4"))
        partial_sums.add_partials(torch.zeros(2, 4, 256, dtype=torch.uint8), torch.zeros(2, 4, 2), X[:4, :256], 0)
    options = [json.loads(str(kernel))["options"]["enable_fp_fusion"] for kernel in listing.kernels]
    assert options == [True, False]  # sums of ranks are rounded one by one

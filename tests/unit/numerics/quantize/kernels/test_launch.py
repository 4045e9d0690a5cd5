"""What launches list: arguments in the order of parameters, and kernels that compile without a GPU.

Arguments are passed by position: first memory, then numbers, then constants. Triton brings its own assembler.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from snip_megatron.numerics import adamw
from snip_megatron.numerics.products import grouped_wgrad, tiled_kernel
from snip_megatron.numerics.products.grouped import group_rows
from snip_megatron.numerics.quantize.device_keys import DeviceKeys, LinearIdentity
from snip_megatron.numerics.quantize.kernels import compiler, exact, launch, partial_sums, programs, quantize, swiglu
from snip_megatron.numerics.quantize.operands import CachedPair
from snip_megatron.numerics.quantize.reference import Rotation
from snip_megatron.sensitivity import sums, sums_programs

from ..specs import spec

X = torch.zeros(256, 512, dtype=torch.bfloat16)
PROBS = torch.zeros(256)
WORDS = torch.zeros(2, dtype=torch.int32)
MODULES = (adamw, exact, grouped_wgrad, partial_sums, quantize, sums, swiglu, tiled_kernel)
EMULATION = (exact, tiled_kernel)
PROGRAMS = (*EMULATION, adamw, grouped_wgrad, partial_sums, programs, sums_programs, swiglu)


def kernels_of(modules: tuple[Any, ...]) -> dict[str, Any]:
    """The kernels that modules define, by their names."""
    return {f"{module.__name__}.{n}": f for module in modules for n, f in vars(module).items() if n.endswith("_kernel")}


def run_emulation() -> None:
    """The kernels of cards before Hopper."""
    for fmt in ("nvfp4_46", "nvfp4", "mxfp4", "mxfp8", "fp8"):
        exact.quantize_exact(X, spec(fmt, fmt, weight=True))
    turned = Rotation(torch.zeros(1, dtype=torch.int32))
    for col in ("nvfp4_hadamard", "mxfp4_hadamard"):
        how = spec("nvfp4_46", col, row_seed=WORDS, col_seed=1, rotation=turned)
        exact.quantize_exact(X, how, CachedPair(exact.quantize_exact(X, how), WORDS[:1]))
    tiled_kernel.multiply(X, torch.zeros(256, 4), 1, X, torch.zeros(2, 4), 128, torch.zeros(256, 256), add=True)


def run_all_kernels() -> None:
    rows = group_rows((3, 0, 200), torch.device("cpu"))
    keys = DeviceKeys([LinearIdentity(0, 1, 0)], (1, 2), torch.device("cpu"))
    drawn, loaded = (spec("fp4", "fp4", row_seed=key, col_seed=key) for key in (1, WORDS))
    for how in (spec("fp8", "fp4"), drawn, loaded, spec("fp8_tensor", "fp8"), spec("fp8", "fp4", weight=True)):
        quantize.quantize_operands(X, how)
    for how in (spec("fp8_tensor", "fp8_tensor", weight=True), spec("fp8", "fp4", weight=True)):
        quantize.quantize_operands(X, how, CachedPair(quantize.quantize_operands(X, how), WORDS[:1]))
    for how, probs in ((spec("fp8", "fp4"), None), (drawn, PROBS), (loaded, None)):
        quantize.quantize_operands(X[:203], how, None, rows.map)
        swiglu.quantize_swiglu(X, how, probs)
        swiglu.quantize_swiglu_gradient(X[:, :256].contiguous(), X, how, probs)
    quantize.quantize_group_blocks(X.view(2, 128, 512), spec("fp8", "fp4", weight=True))
    quantize.of_counts(torch.tensor((3, 0, 200)), 512, backwards=False)
    quantize.unpad(rows.map, quantize.pad(rows.map, X[:203]), 203)
    quantize.advance(keys._state, keys._counts, keys._identities, keys._words, 0, (1, 2))
    swiglu.swiglu_with_amax(X)
    swiglu.swiglu_with_amax(X, X[:, :256].contiguous())
    run_emulation()
    partial_sums.add_partials(torch.zeros(2, 4, 256, dtype=torch.uint8), torch.zeros(2, 4, 2), X[:4, :256], 0)
    tiles = quantize.quantize_operands(X, spec(None, "fp8"))[1]
    for experts in (4, 1):  # few rows an expert, and many
        for side in (X, tiles):
            grouped_wgrad.add_wgrad(side, side, rows.map.table, (True, True), torch.zeros(experts, 512, 512))
    states = [[torch.zeros(size) for size in (5000, 8)] for _ in range(4)]
    models = [torch.zeros(5000, dtype=torch.bfloat16), None]
    adamw.AdamW(*states, models).step(torch.ones(1), 1, 1e-3, (0.9, 0.95), 1e-8, 0.1, corrects=True)
    sums.tensor_sums(X, ("fp8", "fp4", "fp8_tensor"), stochastic=True, d=X)
    sums.weight_sums(X, ("fp8", "fp4", "fp8_tensor"))


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[set[str], list[str]]]:
    """A function that returns the names of the kernels that a call launches on a card, and what it lists."""
    kernel_names = set()

    def check(kernel: Any, grid: Any, memory: Any, numbers: Any, counters: Any, constants: Any, options: Any) -> None:
        names = kernel.arg_names
        pointers, scalars = len(memory), len(numbers) + len(counters)
        assert all(name.endswith("_ptr") for name in names[:pointers])
        assert names[pointers + scalars :] == list(constants)
        plain = {name for name in names if kernel.params[names.index(name)].do_not_specialize}
        if plain:
            assert set(names[pointers + len(numbers) : pointers + scalars]) == plain
        kernel_names.add(f"{kernel.fn.__module__}.{kernel.fn.__name__}")
        on_card = {name: value or name in ("GPU", "HARDWARE") for name, value in constants.items()}
        launch.launch(kernel, grid, memory, numbers, counters, constants | on_card, options)

    def run(call: Callable[[], None], capability: int = 90) -> tuple[set[str], list[str]]:
        monkeypatch.setattr(driver, "_active", None)
        compiler.compile_for(GPUTarget("cuda", capability, 32))
        monkeypatch.setattr(sums, "has_kernels", lambda x: True)
        for kernel in kernels_of(PROGRAMS).values():
            kernel.device_caches.clear()  # a cache remembers its first card
        for module in MODULES:
            monkeypatch.setattr(module, "launch", check)
        with launch.list_launches() as listing:
            call()
        return kernel_names, [str(kernel) for kernel in listing.kernels]

    return run


@pytest.mark.parametrize(
    ("call", "capability", "modules"), [(run_all_kernels, 90, PROGRAMS), (run_emulation, 80, EMULATION)]
)
def test_every_kernel_compiles(listed: Any, call: Callable[[], None], capability: int, modules: Any) -> None:
    names, kernels = listed(call, capability)
    assert names == kernels_of(modules).keys()
    for kernel in kernels:
        name = json.loads(kernel)["name"]
        assembly = compiler._kernel(kernel).preload(kernel).asm
        assert len(assembly["cubin"]) > 1000
        assert f".target sm_{capability}" in assembly["ptx"]
        # Subnormal numbers must survive, except in what Transformer Engine's AdamW updates.
        if all(module.__name__ not in name for module in (swiglu, adamw)):
            assert ".ftz.f32" not in assembly["ptx"].replace("rcp.approx.ftz.f32", "")


def test_multiplications_and_additions_are_fused_whatever_tritons_default(
    listed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")  # the default of Triton 3.10

    def call() -> None:
        quantize.quantize_operands(X, spec("fp8", "fp4"))
        partial_sums.add_partials(torch.zeros(2, 4, 256, dtype=torch.uint8), torch.zeros(2, 4, 2), X[:4, :256], 0)

    options = [json.loads(kernel)["options"]["enable_fp_fusion"] for kernel in listed(call)[1]]
    assert options == [True, False]  # sums of ranks are rounded one by one

"""Every kernel compiles for Hopper without a GPU: Triton brings its own assembler."""

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from snip_megatron.quantization.kernels import keys as triton_keys
from snip_megatron.quantization.kernels import programs as triton_kernels
from snip_megatron.quantization.kernels import swiglu_programs as triton_swiglu
from snip_megatron.quantization.kernels import wire as triton_wire
from snip_megatron.quantization.kernels.quantize import LAUNCH
from snip_megatron.quantization.kernels.swiglu import LAUNCH as SWIGLU_LAUNCH
from snip_megatron.quantization.rounding import splitmix64

HOPPER = GPUTarget("cuda", 90, 32)
STRIDES = {"x_stride": 2048, "row_stride": 2048}
TILES = STRIDES | {
    "ROW": 8, "COL": 4, "ROW_RANDOM": False, "COL_RANDOM": True, "LOADED": False, "PAIRED": True, "DTYPE": "bf16",
    "HARDWARE": True,
}  # fmt: skip
BF16 = {"DTYPE": "bf16", "HARDWARE": True}
SIDES = STRIDES | {"ROW": 8, "COL": 4, "GUARDED": False} | BF16
BOTH = {"ROW": True, "COL": True}
CAPTURED_TILES = TILES | {"ROW": 4, "COL": 4, "ROW_RANDOM": True, "LOADED": True}
POINTERS = {
    "x_ptr": "*i32", "row_ptr": "*i16", "col_ptr": "*u8", "row_scale_ptr": "*fp32", "col_scale_ptr": "*fp32",
    "cols_ptr": "*i64", "amax_ptr": "*i32", "scale_ptr": "*fp32",
    "maxima_ptr": "*i32",
    "row_key_ptr": "*i32", "col_key_ptr": "*i32", "current_ptr": "*i32",
    "probs_ptr": "*fp32", "of_probs_ptr": "*fp32",
    "y_ptr": "*i32", "d_ptr": "*i32", "values_ptr": "*i16", "packed_ptr": "*u8", "parts_ptr": "*u8",
    "elements_ptr": "*u8", "scales_ptr": "*fp32", "own_ptr": "*bf16", "out_ptr": "*bf16", "g_ptr": "*i32",
    "state_ptr": "*i64", "counts_ptr": "*i64", "identities_ptr": "*i64", "words_ptr": "*i32",
}  # fmt: skip


def assembled(
    name: str, constants: dict[str, object], launch: str, x: str = "*i32", module: Any = triton_kernels
) -> Any:
    kernel = getattr(module, name)
    pointers = POINTERS | {"x_ptr": x}
    signature = {a: "constexpr" if a in constants else pointers.get(a, "i32") for a in kernel.arg_names}
    values = {(kernel.arg_names.index(a),): value for a, value in constants.items()}
    divisible = [n for n, a in enumerate(kernel.arg_names) if a not in constants and "word" not in a]
    attributes = {(n,): [["tt.divisibility", 16]] for n in divisible}
    source = ASTSource(kernel, signature, values, attributes)
    options = triton_wire.LAUNCH | LAUNCH | SWIGLU_LAUNCH
    chosen = {"num_warps": constants.get("WARPS", 1)} | options.get(launch, {})
    return triton.compile(source, target=HOPPER, options=chosen)


SWIGLU = {"y_stride": 4096, "row_stride": 2048, "HARDWARE": True, "PROBS": False, "KEPT": False}
WEIGHTED = {"PROBS": True, "KEPT": True}
GRADIENT = SWIGLU | {"d_stride": 2048, "PAIRED": True}
WITH_AMAX = {"y_stride": 4096, "HARDWARE": True}
KERNELS: list[tuple[Any, str, dict[str, object], str]] = [
    (triton_kernels, "tile_kernel", TILES, "stochastic"),
    (triton_kernels, "tile_kernel", TILES | {"DTYPE": "fp16", "COL_RANDOM": False}, "fp8 rows"),
    (triton_kernels, "tile_kernel", CAPTURED_TILES, "stochastic"),
    (triton_kernels, "block_kernel", SIDES | {"GROUP": 0, "GUARDED": True}, "blocks"),
    (triton_kernels, "block_kernel", SIDES | {"GROUP": 12}, "blocks"),
    (triton_kernels, "amax_kernel", {"x_stride": 2048, "GUARDED": True} | BF16, "amax"),
    (triton_kernels, "tensor_kernel", SIDES | BOTH | {"GUARDED": True}, "tensor"),
    (triton_keys, "key_kernel", {"FIRST_MIXED": splitmix64(1), "SECOND_MIXED": splitmix64(2)}, "keys"),
    (triton_wire, "pack_kernel", {"BLOCK": 2048}, "packing"),
    (triton_wire, "unpack_kernel", {"BLOCK": 2048}, "packing"),
    (triton_wire, "add_kernel", {"RANKS": 4, "PIECE": 16}, "sums"),
    (triton_swiglu, "swiglu_kernel", SWIGLU | {"ROW": 8, "COL": 4}, "swiglu"),
    (triton_swiglu, "swiglu_kernel", SWIGLU | WEIGHTED | {"ROW": 8, "COL": 0}, "swiglu"),
    (
        triton_swiglu,
        "swiglu_gradient_kernel",
        GRADIENT | WEIGHTED | {"ROW": 8, "COL": 0, "ROW_RANDOM": False, "COL_RANDOM": False, "LOADED": False},
        "gradient",
    ),
    (
        triton_swiglu,
        "swiglu_gradient_kernel",
        GRADIENT | {"ROW": 4, "COL": 4, "ROW_RANDOM": True, "COL_RANDOM": True, "LOADED": True},
        "gradient",
    ),
    (triton_swiglu, "swiglu_amax_kernel", WITH_AMAX, "swiglu, amax"),
    (triton_swiglu, "swiglu_gradient_amax_kernel", WITH_AMAX | {"d_stride": 2048}, "gradient, amax"),
]


@pytest.mark.parametrize(("module", "name", "constants", "launch"), KERNELS, ids=lambda value: str(value)[:30])
def test_kernel_compiles_for_hopper(module: Any, name: str, constants: dict[str, object], launch: str) -> None:
    compiled = assembled(name, constants, launch, module=module)
    assert ".target sm_90a" in compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 1000
    if module is triton_kernels:  # subnormal numbers must survive
        assert ".ftz.f32" not in compiled.asm["ptx"].replace("rcp.approx.ftz.f32", "")

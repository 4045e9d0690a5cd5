"""Every kernel compiles for Hopper or Ampere without a GPU: Triton brings its own assembler."""

from collections.abc import Mapping
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from snip_megatron.numerics.products.grouped_wgrad import grouped_wgrad_kernel
from snip_megatron.numerics.products.tiled_kernel import tiled_kernel
from snip_megatron.numerics.quantize.kernels import exact, partial_sums, programs, swiglu
from snip_megatron.numerics.quantize.kernels.quantize import LAUNCH
from snip_megatron.numerics.quantize.rounding import splitmix64
from snip_megatron.sensitivity import sums_programs as statistics
from snip_megatron.sensitivity.sums import LAUNCH as SUMS

Constants = dict[str, object]
POINTERS = {
    "x_ptr": "*bf16", "g_ptr": "*bf16", "d_ptr": "*bf16", "w_ptr": "*bf16", "a_ptr": "*bf16", "b_ptr": "*bf16",
    "local_ptr": "*bf16", "from_ptr": "*bf16", "to_ptr": "*bf16", "y_ptr": "*i32", "out_ptr": "*i16",
    "row_ptr": "*i16", "col_ptr": "*u8", "values_ptr": "*i16", "packed_ptr": "*u8", "parts_ptr": "*u8",
    "elements_ptr": "*u8", "cols_ptr": "*i64", "state_ptr": "*i64", "counts_ptr": "*i64", "identities_ptr": "*i64",
    **dict.fromkeys(
        ("amax_ptr", "maxima_ptr", "key_ptr", "row_key_ptr", "col_key_ptr", "current_ptr", "signs_ptr", "words_ptr",
         "row_words_ptr", "col_words_ptr", "experts_ptr", "table_ptr"), "*i32"
    ),
}  # fmt: skip
"""Others are FP32."""
WORDS = {"x_ptr": "*i32", "d_ptr": "*i32", "g_ptr": "*i32"}  # pairs of 16-bit numbers
SCALARS = ("factor", "noise", "mean_scale", "beta1", "beta2", "m_scale", "v_scale", "eps")

# -- quantisers ----------------------------------------------------------------------------------------------------
GPU = {"HARDWARE": True}
STRIDES = {"x_stride": 2048, "row_stride": 2048}
DRAWN = {"ROW": 4, "COL": 4, "ROW_RANDOM": True, "COL_RANDOM": True, "LOADED": True}
TILES = STRIDES | GPU | {"ROW": 8, "COL": 4, "ROW_RANDOM": False, "COL_RANDOM": True, "LOADED": False, "PAIRED": True}
ROWS = TILES | {"COL": 0, "COL_RANDOM": False}
SIDES = STRIDES | GPU | {"ROW": 8, "COL": 4, "GUARDED": False}
SWIGLU = {"y_stride": 4096, "row_stride": 2048, "HARDWARE": True, "PROBS": False, "PLAIN": False}
WEIGHTED = {"PROBS": True, "PLAIN": True, "ROW": 8, "COL": 0}
GRADIENT = SWIGLU | {"d_stride": 2048, "PAIRED": True}
WITH_AMAX = {"y_stride": 4096, "HARDWARE": True}
QUANTISERS: list[tuple[Any, Constants, Mapping[str, int]]] = [
    (programs.tile_kernel, TILES, LAUNCH["stochastic"]),
    (programs.tile_kernel, TILES | {"COL_RANDOM": False}, LAUNCH["fp8 rows"]),
    (programs.tile_kernel, TILES | DRAWN, LAUNCH["stochastic"]),
    (programs.block_kernel, SIDES | {"GROUP": 0, "GUARDED": True}, LAUNCH["blocks"]),
    (programs.block_kernel, SIDES | {"GROUP": 12}, LAUNCH["blocks"]),
    (programs.amax_kernel, GPU | {"x_stride": 2048, "GUARDED": True}, LAUNCH["amax"]),
    (programs.tensor_kernel, SIDES | {"ROW": True, "COL": True, "GUARDED": True}, LAUNCH["tensor"]),
    (programs.quantised_rows_kernel, ROWS, LAUNCH["quantised rows"]),
    (programs.quantised_rows_kernel, ROWS | {"ROW": 4, "ROW_RANDOM": True, "LOADED": True}, LAUNCH["quantised rows"]),
    (programs.key_kernel, {"FIRST_MIXED": splitmix64(1), "SECOND_MIXED": splitmix64(2)}, {"num_warps": 1}),
    (swiglu.swiglu_kernel, SWIGLU | {"ROW": 8, "COL": 4}, swiglu.LAUNCH["swiglu"]),
    (swiglu.swiglu_kernel, SWIGLU | WEIGHTED, swiglu.LAUNCH["swiglu"]),
    (swiglu.swiglu_gradient_kernel, GRADIENT | DRAWN, swiglu.LAUNCH["gradient"]),
    (
        swiglu.swiglu_gradient_kernel,
        GRADIENT | DRAWN | WEIGHTED | {"ROW_RANDOM": False, "COL_RANDOM": False, "LOADED": False},
        swiglu.LAUNCH["gradient of experts"],
    ),
    (swiglu.swiglu_amax_kernel, WITH_AMAX, swiglu.LAUNCH["swiglu, amax"]),
    (swiglu.swiglu_gradient_amax_kernel, WITH_AMAX | {"d_stride": 2048}, swiglu.LAUNCH["gradient, amax"]),
]

# -- emulation, experts, sums --------------------------------------------------------------------------------------
FIXED = {"SIGNS_LOADED": True, "GUARDED": True, "K": 4096, "x_stride": 4096}


def side(
    bits: int, scaling: str, tile: tuple[int, int], *, random: bool = False, four: bool = False, turned: bool = False
) -> tuple[Any, Constants, Mapping[str, int]]:
    shape = exact.SHAPES["tiles of 128" if scaling == "fp32" else "columns" if tile[0] > 1 else "rows"]
    values = {"ELEMENT": bits, "SCALING": scaling, "TILE_ROWS": tile[0], "TILE_COLS": tile[1], "RANDOM": random}
    values |= {"KEY_LOADED": random, "FOUR": four, "ROTATED": turned, "R": max(shape.rows, tile[0])}
    constants = FIXED | values | {"C": shape.cols, "WIDE": shape.wide}
    return exact.side_kernel, constants, {"num_warps": shape.warps}


AMAX = exact.SHAPES["amax"]
PART = FIXED | {"R": AMAX.rows, "C": AMAX.cols, "WIDE": AMAX.wide, "FINITE": True, "ROTATED": True}
TILED = {"A_TILE": 1, "B_TILE": 128, "ADD": True, "BLOCK": 128, "DEPTH": 64, "TILE": 128, "GROUP": 8}
WGRAD = {"BN": 128, "DEPTH": 64, "GROUP": 8, "GPU": True}
PLACES = {"PLACE_8": 0, "PLACE_4": 1, "PLACE_WHOLE": -1}
OTHERS: list[tuple[Any, Constants, Mapping[str, int], int]] = [
    (*side(4, "e4m3_fp32", (1, 16)), 90),
    (*side(4, "e4m3_fp32", (16, 1), random=True), 80),
    (*side(4, "e4m3_fp32", (1, 16), four=True), 80),
    (*side(4, "e4m3_fp32", (16, 1), turned=True, random=True), 90),
    (*side(4, "e4m3_fp32", (16, 16)), 80),
    (*side(4, "e8m0", (32, 1), turned=True, random=True), 90),
    (*side(8, "e8m0", (1, 32)), 90),
    (*side(8, "fp32", (128, 1)), 80),
    (exact.amax_kernel, PART, {"num_warps": AMAX.warps}, 90),
    (tiled_kernel, TILED | {"GPU": True}, {"num_warps": 8}, 80),
    (programs.rows_kernel, {"ROWS": 16, "WIDTH": 512, "PAD": True}, LAUNCH["moved rows"], 90),
    (programs.rows_kernel, {"ROWS": 16, "WIDTH": 1, "PAD": False}, LAUNCH["moved rows"], 90),
    (grouped_wgrad_kernel, WGRAD | {"BK": 128, "FIRST": True}, {"num_warps": 4}, 90),
    (grouped_wgrad_kernel, WGRAD | {"BK": 256, "FIRST": False}, {"num_warps": 8}, 90),
    (partial_sums.add_kernel, {"RANKS": 4, "TILES": 16}, partial_sums.LAUNCH["sums"], 90),
    (statistics.tensor_kernel, PLACES | {"RANDOM": True}, SUMS["tensor"], 90),
    (statistics.dots_kernel, PLACES | {"ROWS": 32}, SUMS["dots"], 90),
    (statistics.weight_kernel, PLACES | {"PLACE_WHOLE": 2}, SUMS["weight"], 90),
    (statistics.squares_kernel, {"BLOCK": 8192, "GROUP": 16}, SUMS["sums"], 90),
    (statistics.output_kernel, {"BLOCK": 4096}, SUMS["sums"], 90),
]


def assembly(
    kernel: Any, constants: Constants, options: Mapping[str, int], capability: int, pointers: Mapping[str, str]
) -> str:
    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        return pointers.get(name, "*fp32") if name.endswith("_ptr") else "fp32" if name in SCALARS else "i32"

    names = kernel.arg_names
    values = {(names.index(name),): value for name, value in constants.items()}
    sizes = (n for n, name in enumerate(names) if name.endswith("_ptr") or (kind(name) == "i32" and "word" not in name))
    source = ASTSource(
        kernel, {name: kind(name) for name in names}, values, {(n,): [["tt.divisibility", 16]] for n in sizes}
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
    assert len(compiled.asm["cubin"]) > 1000
    text: str = compiled.asm["ptx"]
    assert f".target sm_{capability}" in text
    return text


@pytest.mark.parametrize(("kernel", "constants", "options"), QUANTISERS, ids=lambda v: getattr(v, "__name__", ""))
def test_quantisers(kernel: Any, constants: Constants, options: Mapping[str, int]) -> None:
    text = assembly(kernel, constants, options, 90, POINTERS | WORDS)
    if kernel.fn.__module__ == programs.__name__:  # subnormal numbers must survive
        assert ".ftz.f32" not in text.replace("rcp.approx.ftz.f32", "")


@pytest.mark.parametrize(
    ("kernel", "constants", "options", "capability"), OTHERS, ids=lambda v: getattr(v, "__name__", "")
)
def test_others(kernel: Any, constants: Constants, options: Mapping[str, int], capability: int) -> None:
    assert ".ftz.f32" not in assembly(kernel, constants, options, capability, POINTERS)

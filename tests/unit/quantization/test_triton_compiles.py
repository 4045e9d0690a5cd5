"""Every kernel compiles for Hopper without a GPU: Triton brings its own assembler."""

from __future__ import annotations

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from snip_megatron.quantization import triton_kernels
from snip_megatron.quantization.triton_quantize import LAUNCH

HOPPER = GPUTarget("cuda", 90, 32)
STRIDES = {"x_stride": 2048, "row_stride": 2048}
TILES = STRIDES | {
    "ROW": 8, "COL": 4, "ROW_RANDOM": False, "COL_RANDOM": True, "SUMS": True, "SUM_8": 1, "SUM_4": 3,
    "GIVEN_ROWS": True, "GIVEN_COLS": False, "PAIRED": True, "DTYPE": "bf16", "WORDS": True, "HARDWARE": True,
}  # fmt: skip
BF16 = {"DTYPE": "bf16", "WORDS": True, "HARDWARE": True}
SIDES = STRIDES | {"ROW": 8, "COL": 4} | BF16
POINTERS = {
    "x_ptr": "*i32", "row_ptr": "*i16", "col_ptr": "*u8", "row_scale_ptr": "*fp32", "col_scale_ptr": "*fp32",
    "sums_ptr": "*fp32", "rows_ptr": "*i64", "cols_ptr": "*i64", "amax_ptr": "*i32", "scale_ptr": "*fp32",
}  # fmt: skip


def assembled(name: str, constants: dict[str, object], launch: str, x: str = "*i32") -> Any:
    kernel = getattr(triton_kernels, name)
    pointers = POINTERS | {"x_ptr": x}
    signature = {a: "constexpr" if a in constants else pointers.get(a, "i32") for a in kernel.arg_names}
    values = {(kernel.arg_names.index(a),): value for a, value in constants.items()}
    divisible = [n for n, a in enumerate(kernel.arg_names) if a not in constants and "word" not in a]
    attributes = {(n,): [["tt.divisibility", 16]] for n in divisible}
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=HOPPER, options=dict(LAUNCH[launch]))


@pytest.mark.parametrize(
    ("name", "constants", "launch", "x"),
    [
        ("tile_kernel", TILES, "sums", "*i32"),
        (
            "tile_kernel",
            TILES | {"ROW": 4, "ROW_RANDOM": True, "SUMS": False, "SUM_8": 0, "SUM_4": 0},
            "stochastic",
            "*i32",
        ),
        ("tile_kernel", TILES | {"DTYPE": "fp32", "WORDS": False, "PAIRED": False}, "sums", "*fp32"),
        ("tile_kernel", TILES | {"DTYPE": "bf16", "WORDS": False}, "sums", "*bf16"),
        ("tile_kernel", TILES | {"DTYPE": "fp16"}, "sums", "*i32"),
        ("block_kernel", SIDES, "blocks", "*i32"),
        ("amax_kernel", {"x_stride": 2048, "PARTS": 4} | BF16, "amax", "*i32"),
        ("tensor_kernel", SIDES | {"ROW": True, "COL": True}, "tensor", "*i32"),
    ],
)
def test_kernel_compiles_for_hopper(name: str, constants: dict[str, object], launch: str, x: str) -> None:
    compiled = assembled(name, constants, launch, x)
    assert ".target sm_90a" in compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 1000
    if name != "amax_kernel" and 8 in (constants["ROW"], constants["COL"], 8 * (constants["ROW"] is True)):
        assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.asm["ptx"]
    assert ".ftz.f32" not in compiled.asm["ptx"].replace("rcp.approx.ftz.f32", "")  # subnormal numbers must survive


@pytest.mark.parametrize("random", [False, True])
def test_tiles_are_transposed_in_registers(random: bool) -> None:
    """The layouts that the kernels are written for: wide accesses, and no part of the matrix in shared memory."""
    constants = TILES | {"ROW": 4, "ROW_RANDOM": random, "COL_RANDOM": random, "SUMS": False, "SUM_8": 0, "SUM_4": 0}
    compiled = assembled("tile_kernel", constants, "stochastic")
    assert "ld.global.v4.b32" in compiled.asm["ptx"]
    assert "st.global.v4.b32" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 1024
    assert "sizePerThread = [16, 1, 1], threadsPerWarp = [4, 8, 1], warpsPerCTA = [1, 8, 1]" in compiled.asm["ttgir"]

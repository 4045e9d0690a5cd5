"""Every kernel compiles for Hopper without a GPU: Triton brings its own assembler."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("name", "constants", "launch", "x"),
    [
        ("tile_kernel", TILES, "stochastic", "*i32"),
        ("tile_kernel", TILES | {"ROW": 4, "ROW_RANDOM": True, "PAIRED": False}, "stochastic", "*i32"),
        ("tile_kernel", TILES | {"DTYPE": "fp16", "COL_RANDOM": False}, "fp8 rows", "*i32"),
        ("tile_kernel", CAPTURED_TILES, "stochastic", "*i32"),
        ("block_kernel", SIDES, "blocks", "*i32"),
        ("block_kernel", SIDES | {"GUARDED": True}, "blocks", "*i32"),
        ("amax_kernel", {"x_stride": 2048, "GUARDED": False} | BF16, "amax", "*i32"),
        ("amax_kernel", {"x_stride": 2048, "GUARDED": True} | BF16, "amax", "*i32"),
        ("tensor_kernel", SIDES | BOTH, "tensor", "*i32"),
        ("tensor_kernel", SIDES | BOTH | {"GUARDED": True}, "tensor", "*i32"),
    ],
)
def test_kernel_compiles_for_hopper(name: str, constants: dict[str, object], launch: str, x: str) -> None:
    compiled = assembled(name, constants, launch, x)
    assert ".target sm_90a" in compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 1000
    if name != "amax_kernel" and 8 in (constants["ROW"], constants["COL"], 8 * (constants["ROW"] is True)):
        assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.asm["ptx"]
    assert ".ftz.f32" not in compiled.asm["ptx"].replace("rcp.approx.ftz.f32", "")  # subnormal numbers must survive


def test_the_kernel_of_keys_compiles_for_hopper() -> None:
    constants = {"FIRST_MIXED": splitmix64(1), "SECOND_MIXED": splitmix64(2)}
    compiled = assembled("key_kernel", constants, "keys", module=triton_keys)
    assert ".target sm_90a" in compiled.asm["ptx"]
    assert "ld.global" in compiled.asm["ptx"]


@pytest.mark.parametrize("name", ["pack_kernel", "unpack_kernel"])
def test_the_kernels_of_packed_fp4_compile_for_hopper(name: str) -> None:
    compiled = assembled(name, {"BLOCK": 2048}, "packing", module=triton_wire)
    assert ".target sm_90a" in compiled.asm["ptx"]


def test_the_kernel_of_partial_sums_rounds_products() -> None:
    """As the reference does: a fused multiply-add would not."""
    compiled = assembled("add_kernel", {"RANKS": 4, "PIECE": 16}, "sums", module=triton_wire)
    assert ".target sm_90a" in compiled.asm["ptx"]
    assert "mul.rn.f32" in compiled.asm["ptx"]
    assert "fma" not in compiled.asm["ptx"]
    assert "ld.global.v4.b32" in compiled.asm["ptx"]  # sixteen elements at once


@pytest.mark.parametrize("fmt", [4, 8])
def test_the_kernel_of_swiglu_compiles_for_hopper(fmt: int) -> None:
    """The exponential is libdevice's, as in the kernel to which torch compiles SwiGLU, and no division is left."""
    constants = {"y_stride": 4096, "row_stride": 2048, "ROW": fmt, "COL": fmt, "HARDWARE": True}
    compiled = assembled("swiglu_kernel", constants, "swiglu", module=triton_swiglu)
    assert "rcp.approx.ftz.f32" in compiled.asm["ptx"]
    assert "div." not in compiled.asm["ptx"]
    assert "fma.rm.ftz.f32" in compiled.asm["ptx"]
    assert "cvt.rn.bf16x2.f32" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 8192  # bytes of results change hands, no numbers


@pytest.mark.parametrize("fmt", [4, 8])
def test_the_kernel_of_its_gradient_compiles_for_hopper(fmt: int) -> None:
    constants = {
        "d_stride": 2048, "y_stride": 4096, "row_stride": 2048, "ROW": fmt, "COL": fmt, "ROW_RANDOM": fmt == 4,
        "COL_RANDOM": fmt == 4, "LOADED": fmt == 4, "PAIRED": True, "HARDWARE": True,
    }  # fmt: skip
    compiled = assembled("swiglu_gradient_kernel", constants, "gradient", module=triton_swiglu)
    assert "0fBFB8AA3B; ex2.approx.ftz.f32" in compiled.asm["ptx"]  # of the sigmoid: not libdevice's
    assert "div." not in compiled.asm["ptx"]
    assert "fma.rm.ftz.f32" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 8192


@pytest.mark.parametrize("name", ["swiglu", "gradient"])
def test_the_kernels_of_swiglu_with_its_amax_compile_for_hopper(name: str) -> None:
    """With the same instructions for numbers as the kernels above, and with the memory accesses of a copy."""
    kernel = {"swiglu": "swiglu_amax_kernel", "gradient": "swiglu_gradient_amax_kernel"}[name]
    constants = {"d_stride": 2048, "y_stride": 4096, "HARDWARE": True}
    constants = {key: value for key, value in constants.items() if key in getattr(triton_swiglu, kernel).arg_names}
    ptx = assembled(kernel, constants, f"{name}, amax", module=triton_swiglu).asm["ptx"]
    for instruction in ("rcp.approx.ftz.f32", "fma.rm.ftz.f32", "cvt.rn.bf16x2.f32", "st.global.v4.b32"):
        assert instruction in ptx
    assert name == "swiglu" or "0fBFB8AA3B; ex2.approx.ftz.f32" in ptx  # of the sigmoid
    assert ptx.count("ld.global.v4.b32") == {"swiglu": 8, "gradient": 24}[name]  # d and the gates are read once
    assert "atom.global" in ptx


@pytest.mark.parametrize("random", [False, True])
def test_tiles_are_transposed_in_registers(random: bool) -> None:
    """The layouts that the kernels are written for: wide accesses, and no part of the matrix in shared memory."""
    constants = TILES | {"ROW": 4, "ROW_RANDOM": random, "COL_RANDOM": random}
    compiled = assembled("tile_kernel", constants, "stochastic")
    assert "ld.global.v4.b32" in compiled.asm["ptx"]
    assert "st.global.v4.b32" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 1024
    assert "sizePerThread = [16, 1, 1], threadsPerWarp = [4, 8, 1], warpsPerCTA = [1, 8, 1]" in compiled.asm["ttgir"]

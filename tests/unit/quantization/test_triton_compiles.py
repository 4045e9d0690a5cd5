"""Every kernel compiles for Hopper without a GPU: Triton brings its own assembler."""

from __future__ import annotations

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from snip_megatron.quantization import triton_kernels
from snip_megatron.quantization.triton_quantize import LAUNCH

HOPPER = GPUTarget("cuda", 90, 32)
TILES = {
    "ROW": 8, "COL": 4, "ROW_RANDOM": False, "COL_RANDOM": True, "SUMS": True, "SUM_8": 1, "SUM_4": 3,
    "GIVEN_ROWS": True, "GIVEN_COLS": False, "CORRECTIONS": 1, "HARDWARE": True,
}  # fmt: skip
SIDES = {"ROW": 8, "COL": 4, "CORRECTIONS": 1, "HARDWARE": True}
POINTERS = {
    "x_ptr": "*bf16", "row_ptr": "*u8", "col_ptr": "*u8", "row_scale_ptr": "*fp32", "col_scale_ptr": "*fp32",
    "sums_ptr": "*fp32", "rows_ptr": "*i64", "cols_ptr": "*i64", "amax_ptr": "*i32", "scale_ptr": "*fp32",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("tile_kernel", TILES),
        ("tile_kernel", TILES | {"CORRECTIONS": 0, "ROW_RANDOM": True, "ROW": 4}),
        ("block_kernel", SIDES),
        ("amax_kernel", {"PARTS": 4}),
        ("tensor_kernel", SIDES | {"ROW": True, "COL": True}),
    ],
)
def test_kernel_compiles_for_hopper(name: str, constants: dict[str, object]) -> None:
    kernel = getattr(triton_kernels, name)
    signature = {a: "constexpr" if a in constants else POINTERS.get(a, "i32") for a in kernel.arg_names}
    values = {(kernel.arg_names.index(a),): value for a, value in constants.items()}
    compiled = triton.compile(ASTSource(kernel, signature, values), target=HOPPER, options=dict(LAUNCH))
    assert ".target sm_90a" in compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 1000
    if name != "amax_kernel":
        assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.asm["ptx"]
    assert ".ftz.f32" not in compiled.asm["ptx"].replace("rcp.approx.ftz.f32", "")  # subnormal numbers must survive

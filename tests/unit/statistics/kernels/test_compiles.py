"""Every kernel compiles for Hopper without a GPU: Triton brings its own assembler."""

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from snip_megatron.optimizers.kernels import programs as triton_drift_kernel
from snip_megatron.optimizers.kernels.update_error import LAUNCH as DRIFT
from snip_megatron.statistics.kernels import programs as triton_kernels
from snip_megatron.statistics.kernels.sums import LAUNCH as SUMS

HOPPER = GPUTarget("cuda", 90, 32)
PLACES = {"PLACE_8": 0, "PLACE_4": 1, "PLACE_WHOLE": -1}
BF16 = ("x_ptr", "d_ptr", "w_ptr", "g_ptr")
INTEGERS = ("row_words_ptr", "col_words_ptr")
# Of a real model: multiples of 16.
SIZES = ("M", "N", "K", "x_stride", "d_stride", "w_stride", "g_stride", "size", "start")
SCALARS = ("factor", "noise", "mean_scale", "beta1", "beta2", "m_scale", "v_scale", "eps")


def assembled(kernel: Any, constants: dict[str, object], warps: int, g: str = "*bf16") -> Any:
    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name.endswith("_ptr"):
            return g if name in BF16 else "*i32" if name in INTEGERS else "*fp32"
        return "fp32" if name in SCALARS else "i32"

    names = kernel.arg_names
    values = {(names.index(name),): value for name, value in constants.items()}
    divisible = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.endswith("_ptr") or name in SIZES
    }
    source = ASTSource(kernel, {name: kind(name) for name in names}, values, divisible)
    return triton.compile(source, target=HOPPER, options={"num_warps": warps})


DRIFT_CONSTANTS = {"RHOS": 24, "FORMATS": 2, "BLOCK": 2048, "HARDWARE": True}


@pytest.mark.parametrize(
    ("kernel", "constants", "warps", "g"),
    [
        (triton_kernels.tensor_kernel, PLACES | {"RANDOM": True}, SUMS["tensor"]["num_warps"], "*bf16"),
        (triton_kernels.dots_kernel, PLACES | {"ROWS": 32}, SUMS["tensor"]["num_warps"], "*bf16"),
        (triton_kernels.weight_kernel, PLACES | {"PLACE_WHOLE": 2}, SUMS["tensor"]["num_warps"], "*bf16"),
        (triton_kernels.squares_kernel, {"BLOCK": 8192, "GROUP": 16}, SUMS["tensor"]["num_warps"], "*bf16"),
        (triton_kernels.output_kernel, {"BLOCK": 4096}, SUMS["tensor"]["num_warps"], "*bf16"),
        (triton_drift_kernel.update_error_kernel, DRIFT_CONSTANTS, DRIFT["num_warps"], "*fp32"),
    ],
)
def test_kernels_compile_for_hopper(kernel: Any, constants: dict[str, object], warps: int, g: str) -> None:
    assert ".target sm_90a" in assembled(kernel, constants, warps, g).asm["ptx"]

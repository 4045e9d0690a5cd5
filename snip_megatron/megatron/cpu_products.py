"""Products of bf16 matrices on the CPU: the FP32 product, rounded once.

torch multiplies bf16 matrices by oneDNN where the processor has AVX-512. Elsewhere it uses scalar loops, which take 3
to 50 times as long as a product in FP32. FP32 products are fast on every processor, and the numbers of a run on the CPU
then depend on the processor as little as those of an FP32 training.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
# The kernels are in use as long as this object lives.
_LIBRARY = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def install() -> None:
    """Replace torch's CPU kernels of matrix products for this process. Other dtypes keep their bits."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        for name in _PRODUCTS:
            kernel = functools.partial(_product, getattr(torch.ops.aten, name).out)
            _LIBRARY.impl(name, kernel, "CPU", allow_override=True)  # type: ignore[no-untyped-call]


def _product(multiply: Callable[..., torch.Tensor], *operands: Any, **scalars: float) -> torch.Tensor:
    """Call the out variant, whose own kernel has not been replaced."""
    dtype = operands[0].dtype
    if dtype != torch.bfloat16:
        return multiply(*operands, **scalars, out=operands[0].new_empty(0))
    wide = [operand.float() if isinstance(operand, torch.Tensor) else operand for operand in operands]
    return multiply(*wide, **scalars, out=wide[0].new_empty(0)).to(dtype)

# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""A kernel that applies one function of the emulated kernels to vectors, so that a wrong instruction has a name."""

import triton
import triton.language as tl

from snip_megatron.quantization.kernels.exact_memory import halves_of, lifted, scaled
from snip_megatron.quantization.kernels.exact_numbers import (
    _quotient,
    _reciprocal,
    nearest,
)


@triton.jit
def function_kernel(a_ptr, b_ptr, out_ptr, count, NAME: tl.constexpr, BLOCK: tl.constexpr):
    """Store f(a, b) of ``count`` pairs. ``NAME`` is the name of f."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    a, b = tl.load(a_ptr + i, mask=inside, other=1.0), tl.load(b_ptr + i, mask=inside, other=1.0)
    if NAME == "quotient":
        found = _quotient(a, b, True, True)
    elif NAME == "corrected quotient":
        found = _quotient(a, b, False, True)
    elif NAME == "reciprocal":
        found = _reciprocal(b, True)
    elif NAME == "nearest e2m1":
        found = nearest(a, 4, 1.0)
    elif NAME == "nearest e4m3":
        found = nearest(a, 8, 1.0)
    elif NAME == "halves":
        found = halves_of(b, a, True)
    elif NAME == "scaled":
        found = scaled(a.to(tl.int16, bitcast=True), b, True)
    else:
        tl.static_assert(NAME == "lifted")
        found = lifted(a, b, True)
    tl.store(out_ptr + i, found, mask=inside)

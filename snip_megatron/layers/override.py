"""What a measuring pass does in a linear beside overriding formats.

It can perturb the result of a GEMM, and it can report the first-order effect that an error of fprop has on the loss.
"""

import torch

from snip_megatron.layers.context import LinearHandle, Override
from snip_megatron.numerics.products.backend import GemmBackend, unrounded
from snip_megatron.precision import Gemm

NUDGE = 2.0**-6
"""Size of a nudge relative to the machine epsilon of the training dtype. In bf16 a nudge is 1e-4 of a value. That is
far below a rounding step, but about one element in fifty rounds to another value. In FP32 a nudge changes nothing."""


def perturbed(
    override: Override, gemm: Gemm, left: torch.Tensor, right: torch.Tensor, plain: torch.Tensor
) -> torch.Tensor:
    """Return ``left @ right`` times 1 + NUDGE·eps, rounded to the dtype of ``plain``, if ``gemm`` is to be nudged.

    Returns ``plain``, the product that has been computed already, otherwise. The effect of a nudge on the loss is the
    noise that another order of summation would also cause (docs/how-it-works.md).
    """
    if override.perturb is not gemm:
        return plain
    return (unrounded(left, right) * (1.0 + NUDGE * torch.finfo(plain.dtype).eps)).to(plain.dtype)


def output_error(
    override: Override,
    handle: LinearHandle,
    backend: GemmBackend,
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
) -> torch.Tensor | None:
    """Return the error E [T, N] that fprop has in the format ``override.compare``, in y's dtype.

    Returns None if ``override.compare`` is None. It is relative to ``y`` [T, N]; the operands are [T, K] and [N, K].
    """
    fmt = override.compare
    if fmt is None:
        return None
    left, right = (backend.quantize(t, handle.spec(name, t, fmt, None))[0] for name, t in (("x", x), ("w", weight)))
    return (backend.multiply(Gemm.FPROP, left, right, y.dtype).float() - y.float()).to(y.dtype)


def report_error(override: Override, g: torch.Tensor, error: torch.Tensor | None) -> None:
    """Pass ⟨G, E⟩ of this rank's shards to ``override.report``. Does nothing if there is no error or no receiver."""
    if error is not None and override.report is not None:
        override.report((g.float() * error.float()).sum(dtype=torch.float64))

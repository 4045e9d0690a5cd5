"""The update error of AdamW as a Triton kernel: one pass instead of the many passes of ``update_error.py``.

Import this module only where Triton can run: on CUDA, or on a CPU with ``TRITON_INTERPRET=1`` (slow; for tests).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snip_megatron.numerics.quantize.kernels.launch import launch
from snip_megatron.sensitivity.kernels.update_error_programs import update_error_kernel
from snip_megatron.sensitivity.signs import Words
from snip_megatron.sensitivity.signs import words as sign_words
from snip_megatron.sensitivity.updates import AdamWState

_BLOCK = 2048  # elements of a program
LAUNCH: dict[str, int] = {"num_warps": 8, "maxnreg": 80}


@dataclass(frozen=True)
class ErrorSizes:
    """Sizes of the errors of a gradient [N, K], as float64 factors of rows and columns, which have global ids.

    Attributes:
        seed: seed of the signs, which belong to global elements.
        unit_rows, unit_cols: the error of element (n, k) at ρ = 1 is unit_rows[n]·unit_cols[k].
        var_rows, var_cols: [1 + F, N], [1 + F, K]. The error of candidate f has the variance var_rows[f]·var_cols[0] +
            var_rows[0]·var_cols[f]. None if there are no candidates.
    """

    seed: int
    rows: Tensor
    cols: Tensor
    unit_rows: Tensor
    unit_cols: Tensor
    var_rows: Tensor | None = None
    var_cols: Tensor | None = None


def error_sums(
    gradient: Tensor,
    state: AdamWState,
    sizes: ErrorSizes,
    scales: Sequence[float],
    *,
    factor: float,
    noise: float,
    words: Words = sign_words,
) -> tuple[Tensor, Tensor]:
    """Return Σ (u(g + δ) − u(g))² over this rank's elements, at each ρ and of each candidate, float64.

    ``gradient`` are this rank's elements in recorded units, flat, any floating dtype, and ``factor`` brings them to the
    units of the gradient that the optimizer of a step sees, in which ``sizes`` are. ``state`` has their position in the
    flattened [N, K] parameter. ``scales`` are values of ρ; for ``noise`` see
    :func:`snip_megatron.sensitivity.updates.gradient_of_a_step`; ``words`` returns the words of rows and columns.
    """
    size, formats = gradient.numel(), 0 if sizes.var_rows is None else sizes.var_rows.shape[0] - 1
    blocks = -(-size // _BLOCK)
    device = gradient.device
    sums = torch.empty(len(scales) + formats, blocks, dtype=torch.float32, device=device)
    rho = _on_device(tuple(scales), device)
    if size:
        settled = noise < 1.0 and state.step > 0
        next_step = state.step + 1
        launch(
            update_error_kernel, (blocks, 1),
            (
                gradient.contiguous(), state.exp_avg.contiguous(), state.exp_avg_sq.contiguous(), sums,
                rho, *_vectors(sizes, device), *words(sizes.seed, sizes.rows, sizes.cols, device),
            ),
            (state.start, size, sizes.rows.numel(), sizes.cols.numel()),
            (
                float(factor), float(noise) if settled else 1.0,
                1.0 / (1.0 - state.beta1**state.step) if settled else 0.0,
                state.beta1, state.beta2, 1.0 / (1.0 - state.beta1**next_step), 1.0 / (1.0 - state.beta2**next_step),
                state.eps,
            ),
            {"RHOS": len(scales), "FORMATS": formats, "BLOCK": _BLOCK, "HARDWARE": device.type == "cuda"}, LAUNCH,
        )  # fmt: skip
    totals = sums.sum(1, dtype=torch.float64)
    return totals[: len(scales)] * rho.double().square(), totals[len(scales) :]


@functools.cache
def _on_device(scales: tuple[float, ...], device: torch.device) -> Tensor:
    """Return ``scales`` as an FP32 tensor. Cached, because a copy to the device waits for all work that runs there."""
    return torch.tensor(scales, dtype=torch.float32, device=device)


def _vectors(sizes: ErrorSizes, device: torch.device) -> list[Tensor]:
    """Return FP32 factors, those of columns at most 1, so that no product leaves the range of FP32 early."""
    found = []
    for rows, cols in ((sizes.unit_rows, sizes.unit_cols), (sizes.var_rows, sizes.var_cols)):
        if rows is None or cols is None:
            found += [torch.empty(0, dtype=torch.float32, device=device)] * 2
            continue
        largest = cols.amax().clamp(min=torch.finfo(torch.float64).tiny)
        found += [(rows * largest).float().contiguous(), (cols / largest).float().contiguous()]
    return found

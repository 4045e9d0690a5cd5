"""The update error of one parameter on one rank: how far gradient errors of given sizes change its next update.

The size of an element's error is a product of a factor of its row and one of its column, or a sum of two such products
(docs/how-it-works.md, recipe, steps 5 and 6). A single σ for the whole matrix would give elements with v ≈ 0 too large
an error. Signs are random and belong to the global element, so that every sharding draws the same.

On a GPU a Triton kernel evaluates AdamW: one read of g, m and v serves all errors. Torch is the kernel's reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snip_megatron.layers.warm_up import WarmUpLinear
from snip_megatron.numerics.quantize.kernels import has_kernels
from snip_megatron.numerics.quantize.kernels.launch import launch
from snip_megatron.numerics.quantize.rounding import MASK32, ROW_STEP, derive_seed, mix32
from snip_megatron.sensitivity import quantization_error
from snip_megatron.sensitivity.recorder import LinearRecorder, Pass
from snip_megatron.sensitivity.sums import sum_squares
from snip_megatron.sensitivity.table import RHO_GRID
from snip_megatron.sensitivity.updates import AdamWState, gradient_of_a_step

_BLOCK = 2048  # elements of a program
_MOST_ELEMENTS = 2**31 - 2**16  # the kernel's indices have 32 bits
LAUNCH: dict[str, int] = {"num_warps": 8, "maxnreg": 80}

# -- random signs ----------------------------------------------------------------------------------------------
# A sign is a function of (seed, global row, global column). Each row and each column has a word, the finaliser of
# MurmurHash3 applied to its id. For an element, two multiplications mix the exclusive or of its two words, and the
# upper bit is the sign. update_error_programs.py computes the same bits, and repeats the two constants, because device
# code cannot read those of a module.
_FIRST, _SECOND = 0x9E3779B1 - (1 << 32), 0x85EBCA6B - (1 << 32)

Words = Callable[[int, Tensor, Tensor, torch.device], tuple[Tensor, Tensor]]
"""A function with the arguments and results of :func:`sign_words`."""


def sign_words(seed: int, rows: Tensor, cols: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return an int32 word on ``device`` for each row and for each column.

    ``rows`` and ``cols`` are global ids in [0, 2^32), 1-D, in any order.
    """
    return _mixed(derive_seed(seed, 0), rows.to(device)), _mixed(derive_seed(seed, 1), cols.to(device))


class CachedSignWords(dict[int, tuple[Tensor, Tensor]]):
    """:func:`sign_words`, computed once for each ``seed``, which belongs to one parameter.

    A rank always holds the same rows and columns of a parameter. Copying their ids to the device waits for all work
    that runs there.
    """

    def __call__(self, seed: int, rows: Tensor, cols: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        return self[seed] if seed in self else self.setdefault(seed, sign_words(seed, rows, cols, device))


def error_signs(seed: int, rows: Tensor, cols: Tensor) -> Tensor:
    """Return ±1 with equal probability, float32 [len(rows), len(cols)]."""
    row_words, col_words = sign_words(seed, rows, cols, rows.device)
    h = (row_words[:, None] ^ col_words) * _FIRST  # int32 arithmetic wraps, as the hash modulo 2^32 requires
    h ^= (h >> 15) & 0x1FFFF  # the mask makes the shift a logical one
    return (h.mul_(_SECOND) >> 31).mul_(2).add_(1).to(torch.float32)


def _mixed(seed: int, ids: Tensor) -> Tensor:
    return mix32((ids.long() * ROW_STEP + (seed & MASK32)) & MASK32).to(torch.int32)


# -- errors of given sizes -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ErrorSizes:
    """Sizes of the errors of a gradient [N, K], as float64 factors of rows and columns.

    Attributes:
        seed: seed of the signs.
        rows, cols: global ids [N], [K], to which the signs belong.
        unit_rows, unit_cols: [N], [K]. The error of element (n, k) at ρ = 1 is unit_rows[n]·unit_cols[k].
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

    @property
    def candidates(self) -> int:
        return 0 if self.var_rows is None else len(self.var_rows) - 1

    def factors(self, device: torch.device) -> list[Tensor]:
        """Return the four factors in FP32, of columns at most 1, which keeps products in the range of FP32.

        Those of candidates are empty if there are none.
        """
        factors = []
        for rows, cols in ((self.unit_rows, self.unit_cols), (self.var_rows, self.var_cols)):
            if rows is None or cols is None:
                factors += [torch.empty(0, dtype=torch.float32, device=device)] * 2
                continue
            largest = cols.amax().clamp(min=torch.finfo(torch.float64).tiny)
            factors += [(rows * largest).float().contiguous(), (cols / largest).float().contiguous()]
        return factors


@dataclass(frozen=True)
class StepScale:
    """Factors that bring the sums of a probe of ``tokens`` to the gradient that the optimizer sees in a training step.

    ``gradient`` brings recorded G to ∂L/∂Y of the mean token loss, ``clip`` is that of the last step's clipping.
    """

    gradient: float
    clip: float
    tokens: int
    tokens_per_step: int

    @property
    def variance(self) -> float:
        """Variance of a step's gradient by token noise, divided by that of the probe's gradient."""
        return self.tokens / self.tokens_per_step


def _error_sums(
    gradient: Tensor, state: AdamWState, sizes: ErrorSizes, scale: StepScale, words: Words
) -> tuple[Tensor, Tensor]:
    """Return Σ (u(g + δ) − u(g))² over this rank's elements, at each ρ of the grid and of each candidate, float64.

    ``gradient`` is the local main gradient in recorded units, any shape.
    """
    local = gradient.reshape(-1)[state.start : state.end]
    factor, noise = scale.gradient * scale.clip, scale.variance**0.5
    if has_kernels(gradient) and gradient.numel() < _MOST_ELEMENTS:
        return adamw_error_sums(local, state, sizes, RHO_GRID.tolist(), factor=factor, noise=noise, words=words)
    width = len(sizes.cols)
    rows = slice(state.start // width, -(-state.end // width))
    first = rows.start * width
    elements = slice(state.start - first, state.end - first)
    unit_rows, unit_cols, var_rows, var_cols = sizes.factors(gradient.device)

    def product(row_factor: Tensor, col_factor: Tensor) -> Tensor:
        return torch.outer(row_factor[rows], col_factor).view(-1)[elements]

    z = error_signs(sizes.seed, sizes.rows[rows], sizes.cols).view(-1)[elements]
    g = gradient_of_a_step(local.float() * factor, state, noise)
    drift2 = state.squared_error(g, product(unit_rows, unit_cols) * z, RHO_GRID.tolist())
    candidates = []
    for f in range(1, 1 + sizes.candidates):
        variance = product(var_rows[f], var_cols[0]) + product(var_rows[0], var_cols[f])
        candidates.append(state.squared_error(g, variance.sqrt() * z, [1.0]))
    return drift2, torch.cat(candidates) if candidates else drift2[:0]


def adamw_error_sums(
    gradient: Tensor,
    state: AdamWState,
    sizes: ErrorSizes,
    scales: Sequence[float],
    *,
    factor: float,
    noise: float,
    words: Words = sign_words,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel. Return Σ (u(g + δ) − u(g))² at each ρ of ``scales`` and of each candidate, float64.

    ``gradient`` are this rank's elements in recorded units, flat, any floating dtype. ``factor`` brings them to the
    units of ``sizes``, those of the gradient that the optimizer of a step sees. ``state`` has their position in the
    flattened [N, K] parameter. For ``noise`` see :func:`snip_megatron.sensitivity.updates.gradient_of_a_step`.
    """
    size, blocks, device = gradient.numel(), -(-gradient.numel() // _BLOCK), gradient.device
    sums = torch.empty(len(scales) + sizes.candidates, blocks, dtype=torch.float32, device=device)
    rho = _on_device(tuple(scales), device)
    if size:
        from snip_megatron.sensitivity.update_error_programs import update_error_kernel

        settled = noise < 1.0 and state.step > 0
        next_step = state.step + 1
        launch(
            update_error_kernel, (blocks, 1),
            (
                gradient.contiguous(), state.exp_avg.contiguous(), state.exp_avg_sq.contiguous(), sums,
                rho, *sizes.factors(device), *words(sizes.seed, sizes.rows, sizes.cols, device),
            ),
            (state.start, size, sizes.rows.numel(), sizes.cols.numel()),
            (
                float(factor), float(noise) if settled else 1.0,
                1.0 / (1.0 - state.beta1**state.step) if settled else 0.0,
                state.beta1, state.beta2, 1.0 / (1.0 - state.beta1**next_step), 1.0 / (1.0 - state.beta2**next_step),
                state.eps,
            ),
            {"RHOS": len(scales), "FORMATS": sizes.candidates, "BLOCK": _BLOCK, "HARDWARE": device.type == "cuda"},
            LAUNCH,
        )  # fmt: skip
    totals = sums.sum(1, dtype=torch.float64)
    return totals[: len(scales)] * rho.double().square(), totals[len(scales) :]


@functools.cache
def _on_device(scales: tuple[float, ...], device: torch.device) -> Tensor:
    """Return ``scales`` as an FP32 tensor. Cached, because a copy to the device waits for all work that runs there."""
    return torch.tensor(scales, dtype=torch.float32, device=device)


# -- linears and other parameters ------------------------------------------------------------------------------
def linear_update_error(
    recorder: LinearRecorder,
    gradient: Tensor,
    state: AdamWState,
    scale: StepScale,
    *,
    s2: float,
    x2: float,
    g2: float,
    seed: int,
    tokens: float | None = None,
    words: Words = sign_words,
) -> tuple[Tensor, Tensor]:
    """Return this rank's share of a linear's ``drift2`` and ``wdrift2`` (table.py), float64.

    They are the squared update errors of the elements [start, end) of its local weight.

    Args:
        recorder: that of the linear, after :func:`snip_megatron.sensitivity.reduction.reduce_columns`.
        gradient: the local main gradient [N local, K local], summed over data parallel ranks, in recorded units.
        state: the optimizer's update of the elements.
        s2, x2, g2: reduced entries of the table, global and in its units.
        seed: seed of the random signs.
        tokens: tokens that the linear saw, by default all of the probe.
    """
    tokens = scale.tokens if tokens is None else max(tokens, 1.0)
    # The outer product of column norms gives the relative sizes; it is scaled to the norm Σ_t ‖G_t‖²‖X_t‖².
    rescale = s2 * tokens / (g2 * x2) if g2 > 0 and x2 > 0 else 0.0
    power = scale.gradient**2 * scale.variance / tokens * scale.clip**2
    sizes = ErrorSizes(
        seed=seed,
        rows=recorder.handle.out_features,
        cols=recorder.handle.in_features,
        unit_rows=(recorder.g_cols * (power * rescale)).sqrt(),
        unit_cols=recorder.x_cols.sqrt(),
        var_rows=torch.cat([recorder.g_cols[None], recorder.dg_cols]) * power,
        var_cols=torch.cat([recorder.x_cols[None], recorder.dx_cols]),
    )
    return _error_sums(gradient, state, sizes, scale, words)


def sink_update_error(
    gradient: Tensor, state: AdamWState, scale: StepScale, *, seed: int, first_row: int, words: Words = sign_words
) -> Tensor:
    """Return the squared update error over the ρ grid of a parameter that is no linear, float64 [len(RHO_GRID)].

    An error of relative size ρ gives each element ρ times the root mean square of its row: the row of a token in the
    embedding, or the whole weight of a norm. A row without gradient gets no error.

    Args:
        gradient: the local main gradient of any shape, summed over data parallel ranks, in recorded units.
        first_row: global index of its first row.

    The other arguments are those of :func:`linear_update_error`.
    """
    matrix = gradient.reshape(1, -1) if gradient.dim() < 2 else gradient.reshape(gradient.shape[0], -1)
    row_squares = quantization_error.sum_squares(matrix, 1)
    rms = (row_squares / matrix.shape[1]).sqrt().float() * abs(scale.gradient) * scale.variance**0.5
    rows = torch.arange(first_row, first_row + matrix.shape[0], device=gradient.device)
    cols = torch.arange(matrix.shape[1], device=gradient.device)
    sizes = ErrorSizes(seed, rows, cols, rms.double() * scale.clip, torch.ones_like(cols, dtype=torch.float64))
    return _error_sums(gradient, state, sizes, scale, words)[0]


# -- warm-up ---------------------------------------------------------------------------------------------------
_SCALE = StepScale(gradient=1.0, clip=1.0, tokens=1, tokens_per_step=2)
_SINK_ROWS = 128


def warm_up_recording(linear: WarmUpLinear, formats: Sequence[str], sample_tokens: int) -> LinearRecorder:
    """Run the passes of a probe of ``formats`` over two microbatches. Return the recorder with all of its sums."""
    recorder = LinearRecorder(linear.handle, tuple(formats), sample_tokens)
    d = torch.zeros_like(linear.x)
    for phase in Pass:
        recorder.start(phase)
        for _ in range(2):
            recorder.on_backward(linear.x, linear.handle.weight.detach(), linear.g, d, d)
    for dtype in {linear.x.dtype, torch.float32}:
        for size in (1024, 1025):  # Triton compiles different kernels for multiples of 16 and other lengths
            sum_squares(torch.zeros(size, dtype=dtype, device=linear.x.device))
    return recorder


def warm_up_update_error(recorder: LinearRecorder, *, sharded: bool) -> None:
    """Evaluate the update error of a recorded linear; with ``sharded`` optimizer states, of parts of the weight too."""
    weight = recorder.handle.weight
    gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    for start, end in _ranges(weight.numel(), sharded):
        state = _state(gradient, start, end)
        linear_update_error(recorder, gradient, state, _SCALE, s2=1.0, x2=1.0, g2=1.0, seed=0)


def warm_up_sinks(weight: Tensor, *, sharded: bool) -> None:
    """Evaluate the update error of a parameter that is no linear's weight, of a matrix in its first rows only."""
    rows = min(len(weight), _SINK_ROWS) if weight.dim() > 1 else len(weight)
    gradient = torch.zeros(rows, *weight.shape[1:], dtype=torch.float32, device=weight.device)
    for start, end in _ranges(gradient.numel(), sharded):
        sink_update_error(gradient, _state(gradient, start, end), _SCALE, seed=0, first_row=0)


def _ranges(size: int, sharded: bool) -> list[tuple[int, int]]:
    """Return ranges whose ends are multiples of 16 and others, because Triton compiles different kernels for them."""
    if not sharded or size < 64:
        return [(0, size)]
    return [(0, size), (0, size - 3), (3, size), (3, size - 13)]


def _state(gradient: Tensor, start: int, end: int) -> AdamWState:
    moment = torch.zeros(end - start, dtype=torch.float32, device=gradient.device)
    return AdamWState(start, end, 1, moment, moment.clone(), beta1=0.9, beta2=0.95, eps=1e-8)

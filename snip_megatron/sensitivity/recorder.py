"""What a linear records in the backward passes of a probe.

X, W, G and D are available together in the backward only. It runs exactly once per microbatch, with and without
recompute, under every pipeline schedule. Sums are float64 and local; :mod:`snip_megatron.sensitivity.reduction` adds
them up over ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.nn import functional

from snip_megatron.layers.amax import WHOLE_TENSOR
from snip_megatron.layers.context import LinearHandle
from snip_megatron.numerics.products.reference import unrounded
from snip_megatron.numerics.quantize.formats import resolve
from snip_megatron.numerics.quantize.operands import OperandSpec
from snip_megatron.numerics.quantize.reference import Rotation
from snip_megatron.precision import Gemm
from snip_megatron.sensitivity.sums import output_sums, sample_rows, sum_squares, tensor_sums, weight_sums
from snip_megatron.sensitivity.table import BOUNDARY_COLUMNS

OUTPUT_TOKENS = 512
"""Number of evenly spread tokens of a microbatch for which Y and E are computed (``README.md``).

A microbatch with fewer tokens is used whole.
"""


_REPLICATED = {"column": "x", "row": "g", "whole": "xwgy"}
"""Tensors that every tensor parallel rank has whole, so that one of them reports them."""


class Pass(Enum):
    """The passes of a probe over the same microbatches (docs/how-it-works.md, An update: steps 1 and 3)."""

    STATISTICS = "statistics"
    FORWARD_NOISE = "forward_noise"


@dataclass
class _Samples:
    """Sampled rows of X and G of one microbatch in the statistics pass, and the number of rows that each stands for."""

    x: torch.Tensor
    g: torch.Tensor
    weight: float


@dataclass(frozen=True)
class OutputErrorDots:
    """G_t·E_t of one microbatch, float64. Everything but ``rows`` is still to be summed over tensor parallel ranks.

    E = δX·Wᵀ + Q(X)·δWᵀ, so G_t·E_t = D_t·δX_t + (G·δW)_t·Q(X)_t. The first term is known for every token. The second
    is known for a sample and consists of two parts. One is a multiple of D_t·Q(X)_t, because rounding shrinks W on
    average; the factor is fitted on the sample. The square of the other part is proportional to ‖G_t‖²‖X_t‖².

    Attributes:
        values: G_t·E_t of the sampled tokens, [formats, sampled].
        rows: indices of the sampled tokens, [sampled].
        share: ‖G_t‖²‖X_t‖² of every token, [T].
        known: D_t·X_t, then D_t·δX_t of each format, of every token, [1 + formats, T]. None if all tokens are sampled.
    """

    values: torch.Tensor
    rows: torch.Tensor
    share: torch.Tensor
    known: torch.Tensor | None

    def squared(self) -> torch.Tensor:
        """Return Σ_t (G_t·E_t)² over all tokens, [formats]. Exact if all tokens are sampled, otherwise an estimate."""
        if self.known is None:
            return self.values.square().sum(1)
        first, quantised = self.known[1:], self.known[:1] + self.known[1:]
        sample = quantised[:, self.rows]
        rest = self.values - first[:, self.rows]
        shrinkage = _over((rest * sample).sum(1), sample.square().sum(1))[:, None]
        rest = rest - shrinkage * sample
        weight = _over(self.share.sum(), self.share[self.rows].sum())
        return (first + shrinkage * quantised).square().sum(1) + weight * rest.square().sum(1)


@dataclass
class LinearRecorder:
    """Recorder of one linear on one rank, in the current pass ``phase``.

    Attributes:
        sample_tokens: rows of a microbatch that the noise pass compares.
        sums: column of the table → this rank's share of the global sum, float64, a scalar or [formats].
        x_cols, g_cols: Σ_t X_tk² [K local], Σ_t G_tn² [N local].
        dx_cols, dg_cols: the same of the wgrad errors, [formats, K local], [formats, N local].
        dots: one entry per microbatch.
        rows: rows of X so far.
        whole: ‖X‖², ‖G‖², Σ_t ‖G_t‖²‖X_t‖² and the number of tokens of one expert, [4], summed over ranks. None for
            other linears.
    """

    handle: LinearHandle
    formats: tuple[str, ...]
    sample_tokens: int
    phase: Pass = Pass.STATISTICS
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    x_cols: torch.Tensor = field(init=False)
    g_cols: torch.Tensor = field(init=False)
    dx_cols: torch.Tensor = field(init=False)
    dg_cols: torch.Tensor = field(init=False)
    dots: list[OutputErrorDots] = field(default_factory=list)
    whole: torch.Tensor | None = None
    rows: int = 0
    _weighed: bool = False
    _samples: list[_Samples] = field(default_factory=list)
    _compared: int = 0

    def __post_init__(self) -> None:
        n, k = len(self.handle.out_features), len(self.handle.in_features)  # its weight may be stored transposed
        formats = len(self.formats)
        options: dict[str, Any] = {"dtype": torch.float64, "device": self.handle.weight.device}
        self.x_cols, self.g_cols = torch.zeros(k, **options), torch.zeros(n, **options)
        self.dx_cols, self.dg_cols = torch.zeros(formats, k, **options), torch.zeros(formats, n, **options)

    @property
    def _once(self) -> float:
        """1 on the tensor parallel rank that reports replicated tensors, otherwise 0."""
        return 1.0 if self.handle.tp_rank == 0 else 0.0

    def _own(self, tensor: str) -> float:
        """Return 0 if another tensor parallel rank reports this tensor ("x", "w", "g" or "y"), otherwise 1."""
        return self._once if tensor in _REPLICATED[self.handle.parallel] else 1.0

    def start(self, phase: Pass) -> None:
        """Begin a pass. The noise pass compares each microbatch with the same microbatch of the statistics pass."""
        self.phase = phase
        self._compared = 0

    def on_backward(
        self, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, d_local: torch.Tensor, d_reduced: torch.Tensor
    ) -> None:
        """See :class:`snip_megatron.layers.context.BackwardRecorder`."""
        if self.phase is Pass.STATISTICS:
            self._record_weight(w)
            if x.shape[0]:
                self._record(x, w, g, d_local, d_reduced)
            else:  # an expert that no token was sent to
                self._samples.append(_Samples(x, g, 0.0))
        else:
            self._compare(x, g)

    def own_sums(self) -> torch.Tensor:
        """Return this rank's share of :attr:`whole`. Call it before a table takes the sums."""
        zero = torch.zeros((), dtype=torch.float64, device=self.handle.weight.device)
        rows = zero + self.rows * self._once
        return torch.stack([*(self.sums.get(name, zero) for name in ("x2", "g2", "s2")), rows])

    # -- statistics pass ---------------------------------------------------------------------------------------
    def _record_weight(self, w: torch.Tensor) -> None:
        """Record the weight, once per probe: it is the same in all microbatches."""
        if self._weighed:
            return
        self._weighed = True
        w2, *dw2 = weight_sums(w, self.formats, amax=self._amax("w", w))
        self._add("w2", _owned(w2, self._own("w")))
        self._add("dw2", _owned(torch.stack(dw2), self._own("w")))

    def _record(
        self, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, d_local: torch.Tensor, d_reduced: torch.Tensor
    ) -> None:
        x_own, g_own = self._own("x"), self._own("g")
        # D of a replicated input is replicated after an all-reduce, and a shard after a reduce-scatter.
        d_own = x_own if d_reduced.shape[0] == x.shape[0] else 1.0
        amax = {name: self._amax(name, tensor) for name, tensor in (("x", x), ("w", w), ("g", g))}
        d = d_local if x.shape[0] > OUTPUT_TOKENS else None
        of_x = tensor_sums(x, self.formats, amax=amax["x"], rotations=self._rotations("x", x), d=d)
        of_g = tensor_sums(g, self.formats, stochastic=True, amax=amax["g"], rotations=self._rotations("g", g))
        self.rows += x.shape[0]
        self._add("x2", _owned(of_x.cols.sum(), x_own))
        self._add("g2", _owned(of_g.cols.sum(), g_own))
        self._add("d2", _owned(sum_squares(d_reduced), d_own))
        self._add("dx_row2", _owned(of_x.row_errors, x_own))
        self._add("dx_col2", _owned(of_x.col_errors.sum(1), x_own))
        self._add("dg_row2", _owned(of_g.row_errors, g_own))
        self._add("dg_col2", _owned(of_g.col_errors.sum(1), g_own))
        self.x_cols, self.g_cols = self.x_cols + of_x.cols, self.g_cols + of_g.cols
        self.dx_cols, self.dg_cols = self.dx_cols + of_x.col_errors, self.dg_cols + of_g.col_errors
        # One operand is whole on every rank, so the products of the shards add up to that of the whole token. Where all
        # are whole, one rank reports the products.
        own = self._own("y") if self.handle.parallel == "whole" else 1.0
        share = _owned(of_x.rows * of_g.rows, own)
        self._add("s2", share.sum())
        self._record_samples(x, g, x_own, g_own)
        values, rows = self._record_outputs(x, w, g, amax)
        known = None if of_x.dots is None else _owned(of_x.dots, own)
        self.dots.append(OutputErrorDots(_owned(values, own), rows, share, known))

    def _record_samples(self, x: torch.Tensor, g: torch.Tensor, x_own: float, g_own: float) -> None:
        rows = sample_rows(x.shape[0], self.sample_tokens, x.device)
        weight = x.shape[0] / max(len(rows), 1)
        sample = _Samples(x[rows], g[rows], weight)
        self._samples.append(sample)
        self._add("xs2", _owned(sum_squares(sample.x), weight * x_own))
        self._add("gs2", _owned(sum_squares(sample.g), weight * g_own))

    def _record_outputs(
        self, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, amax: dict[str, torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record Y and E of each format, training's GEMM less the plain one, for OUTPUT_TOKENS evenly spread tokens.

        Returns G·E [formats, tokens] and the indices of the tokens.
        """
        backend = self.handle.context.backend
        rows = sample_rows(x.shape[0], OUTPUT_TOKENS, x.device)
        xs, gs = (x, g) if len(rows) == x.shape[0] else (x[rows], g[rows])
        if self.handle.expert is not None:  # experts have any number of tokens, and kernels are looked up by it
            xs, gs = (functional.pad(each, (0, 0, 0, OUTPUT_TOKENS - len(rows))) for each in (xs, gs))
        weight = x.shape[0] / max(len(rows), 1)
        y = unrounded(xs, w.t())
        partial = self.handle.parallel == "row"  # Y is a partial sum then; see reduction.py
        if not partial:
            self._add("y2", _owned(sum_squares(y), weight * self._own("y")))
        zero = g.new_zeros(len(xs), dtype=torch.float64)
        found = []
        for fmt in map(resolve, self.formats):
            if Gemm.FPROP not in fmt.gemms:
                found.append((zero, zero.sum()))
                continue
            x_rowwise, _ = backend.quantize(xs, OperandSpec(fmt, None, amax=amax["x"]))
            w_rowwise, _ = backend.quantize(w, OperandSpec(fmt, None, weight=True, amax=amax["w"]))
            quantised = backend.multiply(Gemm.FPROP, x_rowwise, w_rowwise, torch.float32)
            found.append(output_sums(quantised, y, gs))
        dots, squares = zip(*found, strict=True)
        if not partial:
            self._add("e2", _owned(torch.stack(squares), weight * self._own("y")))
        return torch.stack(dots)[:, : len(rows)], rows

    def _amax(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return max|·| of the whole operand, not of a sample, if a format has one scale per tensor; else None."""
        if not WHOLE_TENSOR & {resolve(fmt) for fmt in self.formats}:
            return None
        shared = self.handle.shared_amax(name, tensor, map(resolve, self.formats))
        if shared is not None or not tensor.numel():
            return shared
        amax: torch.Tensor = torch.linalg.vector_norm(tensor, float("inf")).float()
        return amax

    def _rotations(self, name: str, tensor: torch.Tensor) -> dict[str, Rotation]:
        """Return format → how wgrad transforms an operand, for the formats that do."""
        found = {fmt.value: self.handle.rotation(name, tensor, fmt) for fmt in map(resolve, self.formats)}
        return {fmt: rotation for fmt, rotation in found.items() if rotation is not None}

    # -- noise pass --------------------------------------------------------------------------------------------
    def _compare(self, x: torch.Tensor, g: torch.Tensor) -> None:
        sample = self._samples[self._compared]
        self._compared += 1
        rows = sample_rows(x.shape[0], self.sample_tokens, x.device)
        for name, now, then in (("fx2", x, sample.x), ("fg2", g, sample.g)):
            own = self._own(name[1])
            self._add(name, sum_squares(now[rows].float() - then.float()) * sample.weight * own)

    # -- accumulation ------------------------------------------------------------------------------------------
    def _add(self, name: str, value: torch.Tensor) -> None:
        """Add to the sum of a column: a scalar, or one value a format."""
        self.sums[name] = self.sums[name] + value if name in self.sums else value


def _owned(value: torch.Tensor, share: float) -> torch.Tensor:
    """Return this rank's share of a sum. Skips the product with 1, which would be a kernel launch without effect."""
    return value if share == 1.0 else value * share


def _over(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a / b, or 0 where b is 0."""
    return torch.where(b > 0, a / b, 0.0)


@contextmanager
def attached(recorders: list[LinearRecorder]) -> Iterator[None]:
    """Attach recorders to their linears, and detach them at exit, after an exception too."""
    try:
        for recorder in recorders:
            recorder.handle.state.recorder = recorder
        yield
    finally:
        for recorder in recorders:
            recorder.handle.state.recorder = None


# -- residual stream -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TokenShard:
    """The tokens of a microbatch that this tensor parallel rank holds of the residual stream: share ``rank`` of
    ``size`` equal contiguous ones. The size is 1 if the stream is replicated; exactly one rank then ``reports`` its
    tokens.
    """

    rank: int
    size: int
    reports: bool

    def first_row(self, local_rows: int) -> int:
        return self.rank * local_rows


@functools.lru_cache(maxsize=64)
def held_rows(shard: TokenShard, local_rows: int, count: int, device: torch.device | None = None) -> torch.Tensor:
    """Return local indices of the sampled tokens that a rank holds. Do not write to the result.

    It is cached on the device, because a copy to a GPU waits for its work.
    """
    sampled = sample_rows(local_rows * shard.size, count)
    start = shard.first_row(local_rows)
    return (sampled[(sampled >= start) & (sampled < start + local_rows)] - start).to(device)


@dataclass
class Boundary:
    """Recorder of one boundary on one rank, in the current pass ``phase``. Tensors are [s(/tp), b, hidden] and are
    flattened to tokens × hidden.

    Attributes:
        h, r: sampled h_b and r_b of each forward in the statistics pass. A layer of multi-token prediction may run
            several times for a microbatch, with backward passes in the opposite order.
        weight: factor from a sum over sampled tokens to all tokens of a microbatch.
        sums: column name → float64 scalar, this rank's share of the global sum.
    """

    index: int
    shard: TokenShard
    sample_tokens: int
    phase: Pass = Pass.STATISTICS
    h: list[torch.Tensor] = field(default_factory=list)
    r: dict[int, torch.Tensor] = field(default_factory=dict)
    weight: float = 1.0
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    _forwards: int = 0

    def start(self, phase: Pass) -> None:
        self.phase = phase
        self._forwards = 0

    @property
    def seen(self) -> bool:
        """Whether this pass has recorded a forward."""
        return self._forwards > 0

    def sampled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a float32 copy of the sampled tokens of [s, b, hidden] that this rank holds."""
        flat = tensor.detach().reshape(-1, tensor.shape[-1])
        rows = held_rows(self.shard, flat.shape[0], self.sample_tokens, flat.device)
        total = flat.shape[0] * self.shard.size
        self.weight = total / max(min(total, self.sample_tokens), 1)
        return flat[rows].float()

    def on_forward(self, tensor: torch.Tensor) -> None:
        """Record the stream in the forward, and register a hook that records its gradient."""
        h, index = self.sampled(tensor), self._forwards
        if self.phase is Pass.STATISTICS:
            self.h.append(h)
            self._add("h2", h)
            if not tensor.requires_grad:  # all below it is frozen
                self.r[index] = torch.zeros_like(h)
        else:
            self._add("cn2", (self.r[index] * (h - self.h[index])).sum(1))
        self._forwards += 1
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self.on_gradient(gradient, index))  # type: ignore[no-untyped-call]

    def on_gradient(self, gradient: torch.Tensor, index: int) -> None:
        """Record the gradient of the stream of one forward: the sum of those of the branch and of the residual."""
        r = self.sampled(gradient)
        if self.phase is Pass.STATISTICS:
            self.r[index] = r
            self._add("r2", r)
        else:
            self._add("fr2", r - self.r[index])

    def finish_statistics(self, above: Boundary) -> None:
        """After the statistics pass, record what the branch between this boundary and the one ``above`` added."""
        for index, (low, high) in enumerate(zip(self.h, above.h, strict=True)):
            self._add("branch_h2", high - low)
            self._add("branch_r2", above.r[index] - self.r[index])

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        assert name in BOUNDARY_COLUMNS
        if self.shard.reports:
            value = sum_squares(tensor)
            self.sums[name] = self.sums.get(name, torch.zeros_like(value)) + value * self.weight

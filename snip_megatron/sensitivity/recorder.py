"""What a probe records: the operands of each linear in the backward, and the residual stream between sub-blocks.

X, W, G and D of a linear are available together in the backward only. It runs exactly once per microbatch, with and
without recompute, under every pipeline schedule. Sums are float64 and local to the rank;
:mod:`snip_megatron.sensitivity.reduction` adds them up over ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from snip_megatron.layers.context import WHOLE_TENSOR, LinearHandle, amax_of
from snip_megatron.layers.warm_up import WarmUpLinear
from snip_megatron.numerics.products.backend import unrounded
from snip_megatron.numerics.quantize.formats import resolve
from snip_megatron.numerics.quantize.operands import OperandSpec
from snip_megatron.numerics.quantize.reference import Rotation
from snip_megatron.precision import Gemm
from snip_megatron.sensitivity.probe_memory import OUTPUT_TOKENS
from snip_megatron.sensitivity.quantization_error import output_sums
from snip_megatron.sensitivity.sums import sample_rows, sum_squares, tensor_sums, weight_sums

_REPLICATED = {"column": "x", "row": "g", "whole": "xwgy"}
"""How a linear is split → the tensors that every tensor parallel rank has whole."""


Attempt = Callable[..., Any]
"""Calls its first argument with the other arguments. It may catch an exception, so that the pass goes on."""


def directly(work: Callable[..., Any], *args: Any) -> Any:
    """Call ``work``."""
    return work(*args)


class Pass(Enum):
    """The passes of a probe over the same microbatches (docs/how-it-works.md, An update: steps 1 and 3)."""

    STATISTICS = "statistics"
    FORWARD_NOISE = "forward_noise"


@dataclass(frozen=True)
class OutputErrorDots:
    """G_t·E_t of one microbatch, float64. All tensors but ``rows`` are partial sums over tensor parallel ranks.

    E = δX·Wᵀ + Q(X)·δWᵀ, so G_t·E_t = D_t·δX_t + (G·δW)_t·Q(X)_t. The first term is known for every token. The second
    is known for a sample and consists of two parts. One is a multiple of D_t·Q(X)_t, because rounding shrinks W on
    average; the factor is fitted on the sample. The square of the other part is proportional to ‖G_t‖²‖X_t‖².
    """

    values: Tensor  # G_t·E_t of the sampled tokens, [formats, sampled]
    rows: Tensor  # indices of the sampled tokens, [sampled]
    norms2: Tensor  # ‖G_t‖²‖X_t‖² of every token, [T]
    # D_t·X_t, then D_t·δX_t of each format, of every token, [1 + formats, T]. None if all tokens are sampled
    dots: Tensor | None

    def squared(self) -> Tensor:
        """Return Σ_t (G_t·E_t)² over all tokens, [formats]. It is exact if all tokens are sampled."""
        if self.dots is None:
            return self.values.square().sum(1)
        of_x_errors, of_quantized_x = self.dots[1:], self.dots[:1] + self.dots[1:]
        sample = of_quantized_x[:, self.rows]
        residual = self.values - of_x_errors[:, self.rows]
        shrinkage = _quotient((residual * sample).sum(1), sample.square().sum(1))[:, None]
        residual = residual - shrinkage * sample
        weight = _quotient(self.norms2.sum(), self.norms2[self.rows].sum())
        return (of_x_errors + shrinkage * of_quantized_x).square().sum(1) + weight * residual.square().sum(1)


# -- linears ---------------------------------------------------------------------------------------------------
@dataclass
class LinearRecorder:
    """Recorder of one linear on one rank, in the current pass ``phase``."""

    handle: LinearHandle
    formats: tuple[str, ...]
    sample_tokens: int  # rows of a microbatch that the noise pass compares
    phase: Pass = Pass.STATISTICS
    # column of the table → this rank's share of the global sum, float64, a scalar or [formats]
    sums: dict[str, Tensor] = field(default_factory=dict)
    # x_cols, g_cols: Σ_t X_tk² [K local], Σ_t G_tn² [N local]
    x_cols: Tensor = field(init=False)
    g_cols: Tensor = field(init=False)
    # dx_cols, dg_cols: the same of the wgrad errors, [formats, K local], [formats, N local]
    dx_cols: Tensor = field(init=False)
    dg_cols: Tensor = field(init=False)
    dots: list[OutputErrorDots] = field(default_factory=list)  # one entry per microbatch
    # ‖X‖², ‖G‖², Σ_t ‖G_t‖²‖X_t‖² and the number of tokens of one expert, [4], summed over ranks. None for other
    # linears
    expert_sums: Tensor | None = None
    rows: int = 0  # rows of X so far
    attempt: Attempt = directly  # calls what no other rank waits for
    _backwards: int = 0
    _samples: list[tuple[Tensor, Tensor, float]] = field(default_factory=list)
    """Sampled rows of X and of G of each microbatch, and the number of rows that each of them stands for."""
    _compared: int = 0

    def __post_init__(self) -> None:
        n, k = len(self.handle.out_features), len(self.handle.in_features)  # its weight may be stored transposed
        formats = len(self.formats)
        options: dict[str, Any] = {"dtype": torch.float64, "device": self.handle.weight.device}
        self.x_cols, self.g_cols = torch.zeros(k, **options), torch.zeros(n, **options)
        self.dx_cols, self.dg_cols = torch.zeros(formats, k, **options), torch.zeros(formats, n, **options)

    def start(self, phase: Pass) -> None:
        """Begin a pass. The noise pass compares each microbatch with the same microbatch of the statistics pass."""
        self.phase = phase
        self._compared = 0

    def on_backward(self, x: Tensor, w: Tensor, g: Tensor, d_local: Tensor, d_reduced: Tensor) -> None:
        """See :class:`snip_megatron.layers.context.BackwardRecorder`.

        Its collectives run on every rank, also on one whose recording has failed.
        """
        if self.phase is Pass.FORWARD_NOISE:
            self.attempt(self._compare, x, g)
            return
        amax: dict[str, Tensor | None] = {}
        rotations: dict[str, dict[str, Rotation]] = {}
        if x.shape[0] or not self._backwards:
            amax["w"] = self._amax("w", w)
        if x.shape[0]:  # else an expert without tokens
            amax |= {name: self._amax(name, tensor) for name, tensor in (("x", x), ("g", g))}
            rotations = {name: self._rotations(name, tensor) for name, tensor in (("x", x), ("g", g))}
        self._backwards += 1
        self.attempt(self._record, x, w, g, d_local, d_reduced, amax, rotations)

    def local_expert_sums(self) -> Tensor:
        """Return this rank's share of :attr:`expert_sums`. Call it before a table takes the sums."""
        zero = torch.zeros((), dtype=torch.float64, device=self.handle.weight.device)
        rows = zero + (self.rows if self.handle.tp_rank == 0 else 0)
        return torch.stack([*(self.sums.get(name, zero) for name in ("x2", "g2", "s2")), rows])

    def _reported(self, tensor: str) -> float:
        """Return 1 if this rank reports the tensor ("x", "w", "g" or "y"). Of replicated tensors, tensor parallel rank
        0 reports.
        """
        return 0.0 if tensor in _REPLICATED[self.handle.parallel] and self.handle.tp_rank else 1.0

    def _add(self, column: str, value: Tensor, factor: float = 1.0) -> None:
        """Add ``value`` × ``factor`` to the sum of a column."""
        value = _scaled(value, factor)
        self.sums[column] = self.sums[column] + value if column in self.sums else value

    # -- statistics pass ---------------------------------------------------------------------------------------
    def _record(
        self,
        x: Tensor,
        w: Tensor,
        g: Tensor,
        d_local: Tensor,
        d_reduced: Tensor,
        amax: dict[str, Tensor | None],
        rotations: dict[str, dict[str, Rotation]],
    ) -> None:
        if "w2" not in self.sums:  # the weight is the same in all microbatches
            w2, *dw2 = weight_sums(w, self.formats, amax=amax["w"])
            self._add("w2", w2, self._reported("w"))
            self._add("dw2", torch.stack(dw2), self._reported("w"))
        if not x.shape[0]:
            self._samples.append((x, g, 0.0))
            return
        of_x, of_g = self._reported("x"), self._reported("g")
        d = d_local if x.shape[0] > OUTPUT_TOKENS else None
        x_sums = tensor_sums(x, self.formats, amax=amax["x"], rotations=rotations["x"], d=d)
        g_sums = tensor_sums(g, self.formats, stochastic=True, amax=amax["g"], rotations=rotations["g"])
        self.rows += x.shape[0]
        self._add("x2", x_sums.cols.sum(), of_x)
        self._add("g2", g_sums.cols.sum(), of_g)
        # D of a replicated input is replicated after an all-reduce, and a shard after a reduce-scatter.
        self._add("d2", sum_squares(d_reduced), of_x if d_reduced.shape[0] == x.shape[0] else 1.0)
        self._add("dx_row2", x_sums.row_errors, of_x)
        self._add("dx_col2", x_sums.col_errors.sum(1), of_x)
        self._add("dg_row2", g_sums.row_errors, of_g)
        self._add("dg_col2", g_sums.col_errors.sum(1), of_g)
        self.x_cols, self.g_cols = self.x_cols + x_sums.cols, self.g_cols + g_sums.cols
        self.dx_cols, self.dg_cols = self.dx_cols + x_sums.col_errors, self.dg_cols + g_sums.col_errors
        # One operand is whole on every rank, so the products of the shards add up to that of the whole token. Where
        # both are whole, one rank reports the products.
        of_products = self._reported("y") if self.handle.parallel == "whole" else 1.0
        norms2 = _scaled(x_sums.rows * g_sums.rows, of_products)
        self._add("s2", norms2.sum())
        self._sample(x, g, of_x, of_g)
        values, rows = self._record_outputs(x, w, g, amax)
        dots = None if x_sums.dots is None else _scaled(x_sums.dots, of_products)
        self.dots.append(OutputErrorDots(_scaled(values, of_products), rows, norms2, dots))

    def _sample(self, x: Tensor, g: Tensor, of_x: float, of_g: float) -> None:
        rows = sample_rows(x.shape[0], self.sample_tokens, x.device)
        weight = x.shape[0] / max(len(rows), 1)
        self._samples.append((x[rows], g[rows], weight))
        self._add("xs2", sum_squares(x[rows]), weight * of_x)
        self._add("gs2", sum_squares(g[rows]), weight * of_g)

    def _record_outputs(self, x: Tensor, w: Tensor, g: Tensor, amax: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
        """Record Y and E of each format for OUTPUT_TOKENS evenly spread tokens. E is training's GEMM less the plain
        one.

        Returns G·E [formats, tokens] and the indices of the tokens.
        """
        backend = self.handle.context.backend
        rows = sample_rows(x.shape[0], OUTPUT_TOKENS, x.device)
        xs, gs = (x, g) if len(rows) == x.shape[0] else (x[rows], g[rows])
        if self.handle.expert is not None:  # experts have any number of tokens, and kernels are looked up by it
            xs, gs = (functional.pad(each, (0, 0, 0, OUTPUT_TOKENS - len(rows))) for each in (xs, gs))
        y = unrounded(xs, w.t())
        zero = g.new_zeros(len(xs), dtype=torch.float64)
        sums = []
        for fmt in map(resolve, self.formats):
            if Gemm.FPROP not in fmt.gemms:
                sums.append((zero, zero.sum()))
                continue
            x_rowwise, _ = backend.quantize(xs, OperandSpec(fmt, None, amax=amax["x"]))
            w_rowwise, _ = backend.quantize(w, OperandSpec(fmt, None, weight=True, amax=amax["w"]))
            quantized = backend.multiply(Gemm.FPROP, x_rowwise, w_rowwise, torch.float32)
            sums.append(output_sums(quantized, y, gs))
        dots, squares = zip(*sums, strict=True)
        if self.handle.parallel != "row":  # else Y and E are partial sums; reduction.py completes the table
            weight = x.shape[0] / max(len(rows), 1) * self._reported("y")
            self._add("y2", sum_squares(y), weight)
            self._add("e2", torch.stack(squares), weight)
        return torch.stack(dots)[:, : len(rows)], rows

    def _amax(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return max|·| of the whole operand, not of a sample. None if no format has one scale per tensor."""
        if WHOLE_TENSOR.isdisjoint(map(resolve, self.formats)):
            return None
        shared = self.handle.shared_amax(name, tensor, map(resolve, self.formats))
        return amax_of(tensor) if shared is None and tensor.numel() else shared

    def _rotations(self, name: str, tensor: Tensor) -> dict[str, Rotation]:
        """Return format → how wgrad transforms an operand, for the formats that do."""
        rotations = {fmt.value: self.handle.rotation(name, tensor, fmt) for fmt in map(resolve, self.formats)}
        return {fmt: rotation for fmt, rotation in rotations.items() if rotation is not None}

    # -- noise pass --------------------------------------------------------------------------------------------
    def _compare(self, x: Tensor, g: Tensor) -> None:
        x_before, g_before, weight = self._samples[self._compared]
        self._compared += 1
        rows = sample_rows(x.shape[0], self.sample_tokens, x.device)
        self._add("fx2", sum_squares(x[rows].float() - x_before.float()), weight * self._reported("x"))
        self._add("fg2", sum_squares(g[rows].float() - g_before.float()), weight * self._reported("g"))


def _scaled(value: Tensor, factor: float) -> Tensor:
    """Return value × factor, without the kernel launch that a product with 1 would take."""
    return value if factor == 1.0 else value * factor


def _quotient(a: Tensor, b: Tensor) -> Tensor:
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
    """The tokens of a microbatch that this tensor parallel rank holds of the residual stream."""

    rank: int  # which of ``size`` equal contiguous shares they are
    size: int  # 1 if the stream is replicated
    reports: bool  # of a replicated stream, exactly one rank reports its tokens

    def first_row(self, local_rows: int) -> int:
        return self.rank * local_rows


@functools.lru_cache(maxsize=64)
def local_sample_rows(shard: TokenShard, local_rows: int, count: int, device: torch.device | None = None) -> Tensor:
    """Return the local indices of the sampled tokens that are in a shard. Do not write to the result.

    It is cached on the device, because a copy to a GPU waits for its work.
    """
    sampled = sample_rows(local_rows * shard.size, count)
    start = shard.first_row(local_rows)
    return (sampled[(sampled >= start) & (sampled < start + local_rows)] - start).to(device)


@dataclass
class Boundary:
    """Recorder of the residual stream at one boundary on one rank, in the current pass ``phase``.

    Boundary b is the input of sub-block b (2i: attention of layer i, 2i + 1: its MLP). Boundary 2L is the output of the
    last layer. The stream is h_b, its gradient r_b = ∂L/∂h_b; tensors are [s(/tp), b, hidden], flattened to tokens ×
    hidden.
    """

    index: int
    shard: TokenShard
    sample_tokens: int
    phase: Pass = Pass.STATISTICS
    # h, r: sampled h_b and r_b of each forward in the statistics pass. A layer of multi-token prediction may run
    # several times for a microbatch, with backward passes in the opposite order
    h: list[Tensor] = field(default_factory=list)
    r: dict[int, Tensor] = field(default_factory=dict)
    weight: float = 1.0  # factor from a sum over sampled tokens to all tokens of a microbatch
    # column of the table → this rank's share of the global sum, a float64 scalar
    sums: dict[str, Tensor] = field(default_factory=dict)
    attempt: Attempt = directly  # calls what no other rank waits for
    _forwards: int = 0

    def start(self, phase: Pass) -> None:
        self.phase = phase
        self._forwards = 0

    @property
    def has_forward(self) -> bool:
        """Whether this pass has recorded a forward."""
        return self._forwards > 0

    def on_forward(self, tensor: Tensor) -> None:
        """Record the stream in the forward, and register a hook that records its gradient."""
        self.attempt(self._on_forward, tensor)

    def _on_forward(self, tensor: Tensor) -> None:
        h, index = self._sample(tensor), self._forwards
        if self.phase is Pass.STATISTICS:
            self.h.append(h)
            self._add("h2", h)
            if not tensor.requires_grad:  # all below it is frozen
                self.r[index] = torch.zeros_like(h)
        else:
            self._add("cn2", (self.r[index] * (h - self.h[index])).sum(1))
        self._forwards += 1
        if tensor.requires_grad:
            record = functools.partial(self.attempt, self._on_gradient)
            tensor.register_hook(lambda gradient: record(gradient, index))  # type: ignore[no-untyped-call]

    def _on_gradient(self, gradient: Tensor, index: int) -> None:
        """Record the gradient of the stream of one forward: the sum of those of the branch and of the residual."""
        r = self._sample(gradient)
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

    def _sample(self, tensor: Tensor) -> Tensor:
        """Return a float32 copy of the sampled tokens of [s, b, hidden] that this rank holds."""
        flat = tensor.detach().reshape(-1, tensor.shape[-1])
        rows = local_sample_rows(self.shard, flat.shape[0], self.sample_tokens, flat.device)
        total = flat.shape[0] * self.shard.size
        self.weight = total / max(min(total, self.sample_tokens), 1)
        return flat[rows].float()

    def _add(self, column: str, tensor: Tensor) -> None:
        if self.shard.reports:
            value = sum_squares(tensor) * self.weight
            self.sums[column] = self.sums[column] + value if column in self.sums else value


# -- warm-up -----------------------------------------------------------------------------------------------------------
def warm_up_recording(linear: WarmUpLinear, formats: Sequence[str], sample_tokens: int) -> None:
    """Run the passes of a probe of ``formats`` over two microbatches."""
    recorder = LinearRecorder(linear.handle, tuple(formats), sample_tokens)
    d = torch.zeros_like(linear.x)
    for phase in Pass:
        recorder.start(phase)
        for _ in range(2):
            recorder.on_backward(linear.x, linear.handle.weight.detach(), linear.g, d, d)

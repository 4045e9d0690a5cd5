"""What one linear records in the backwards of a probe.

The backward is the one place where X, W, G and D are all at hand, and it runs exactly once a microbatch, recomputed or
not, under every pipeline schedule. Sums are float64 and local; :mod:`snip_megatron.statistics.reduction` adds them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

import torch

from snip_megatron.layers.context import GEMM_INDEX, LinearHandle
from snip_megatron.precision import Gemm
from snip_megatron.quantization import FOUR_BIT, derive_seed, fake_quantize
from snip_megatron.statistics.sums import sample_rows, sum_squares


class Pass(Enum):
    """The probe's passes over the same microbatches (METHOD, the six steps: 1 to 3)."""

    STATISTICS = "statistics"
    FORWARD_NOISE = "forward_noise"
    BACKWARD_NOISE = "backward_noise"


@dataclass
class _Samples:
    """Rows of X and G of one microbatch in the statistics pass, and how many rows they stand for."""

    x: torch.Tensor
    g: torch.Tensor
    weight: float


@dataclass
class LinearRecorder:
    """Recorder of one linear on one rank.

    Attributes:
        handle: the linear.
        formats: candidate formats.
        sample_tokens: rows a microbatch that noise passes compare.
        sums: column name → float64 scalar, this rank's share of the global sum.
        by_format: column name → float64 [formats].
        x_cols, g_cols: Σ_t X_tk² [K local], Σ_t G_tn² [N local].
        dx_cols, dg_cols: the same of the wgrad errors, [formats, K local], [formats, N local].
        dots: per microbatch.
        each_gw2: Σ over microbatches of ‖∇W‖² of one alone, as recorded.
        microbatches: seen in the statistics pass.
    """

    handle: LinearHandle
    formats: tuple[str, ...]
    sample_tokens: int
    phase: Pass = Pass.STATISTICS
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    by_format: dict[str, torch.Tensor] = field(default_factory=dict)
    x_cols: torch.Tensor | None = None
    g_cols: torch.Tensor | None = None
    dx_cols: torch.Tensor | None = None
    dg_cols: torch.Tensor | None = None
    dots: list[Dots] = field(default_factory=list)
    each_gw2: torch.Tensor | None = None
    microbatches: int = 0
    _samples: list[_Samples] = field(default_factory=list)
    _compared: int = 0

    @property
    def _once(self) -> float:
        """1 on the tensor parallel rank that reports replicated tensors, else 0."""
        return 1.0 if self.handle.tp_rank == 0 else 0.0

    def start(self, phase: Pass) -> None:
        """Begin a pass; noise passes compare with the statistics pass microbatch by microbatch."""
        self.phase = phase
        self._compared = 0

    def on_backward(
        self, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, d_local: torch.Tensor, d_reduced: torch.Tensor
    ) -> None:
        """See :class:`snip_megatron.layers.context.BackwardRecorder`."""
        if self.phase is Pass.STATISTICS:
            self._note_gradient(x, g)
            self._record(x, w, g, d_reduced)
        else:
            self._compare(x, g)

    def _note_gradient(self, x: torch.Tensor, g: torch.Tensor) -> None:
        """wgrad has been accumulated by now: after the first microbatch ``main_grad`` is that microbatch's gradient,
        the others' are multiplied out once more."""
        self.microbatches += 1
        gradient = getattr(getattr(self.handle.module, "weight", None), "main_grad", None)
        if self.microbatches > 1 or gradient is None:
            gradient = g.t() @ x
        self.each_gw2 = _plus(self.each_gw2, sum_squares(gradient))

    # -- statistics pass ---------------------------------------------------------------------------------------
    def _record(
        self, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, d_local: torch.Tensor, d_reduced: torch.Tensor
    ) -> None:
        first = not self.dots
        column = self.handle.parallel == "column"
        x_own = self._once if column else 1.0  # a column-parallel input is replicated, everything else is a shard
        g_own = 1.0 if column else self._once
        # The gradient of a replicated input is replicated after its all-reduce; reduce-scattered, it is a shard.
        d_own = self._once if column and d_reduced.shape[0] == x.shape[0] else 1.0
        self._add("x2", sum_squares(x) * x_own)
        self._add("g2", sum_squares(g) * g_own)
        self._add("d2", sum_squares(d_reduced) * d_own)
        self._add("s2", (sum_squares(g, 1) * sum_squares(x, 1)).sum())
        self.x_cols = _plus(self.x_cols, sum_squares(x, 0))
        self.g_cols = _plus(self.g_cols, sum_squares(g, 0))
        if first:
            self._add("w2", sum_squares(w))
        self._record_samples(x, w, g, x_own, g_own)
        self._record_errors(x, w, g, d_local, x_own, g_own, first)

    def _record_samples(self, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, x_own: float, g_own: float) -> None:
        rows = sample_rows(x.shape[0], self.sample_tokens).to(x.device)
        weight = x.shape[0] / max(len(rows), 1)
        sample = _Samples(x[rows].clone(), g[rows].clone(), weight)
        self._samples.append(sample)
        self._add("xs2", sum_squares(sample.x) * weight * x_own)
        self._add("gs2", sum_squares(sample.g) * weight * g_own)
        if self.handle.parallel == "column":  # a row-parallel Y is partial here: reduction takes the branch's norm
            self._add("y2", sum_squares(sample.x.float() @ w.float().t()) * weight)

    def _record_errors(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        g: torch.Tensor,
        d_local: torch.Tensor,
        x_own: float,
        g_own: float,
        first: bool,
    ) -> None:
        dots, dx_cols, dg_cols = [], [], []
        for index, fmt in enumerate(self.formats):
            ax, aw, ag = (self.handle.shared_amax(name, t, (fmt,)) for name, t in (("x", x), ("w", w), ("g", g)))
            qx, qw = fake_quantize(x, fmt, tensor_amax=ax), fake_quantize(w, fmt, block=True, tensor_amax=aw)
            dx, dw = qx - x.float(), qw - w.float()
            dx_wgrad = fake_quantize(x, fmt, axis=0, tensor_amax=ax) - x.float()
            dg_dgrad = self._quantize_g(g, fmt, Gemm.DGRAD, -1, ag) - g.float()
            dg_wgrad = self._quantize_g(g, fmt, Gemm.WGRAD, 0, ag) - g.float()
            self._add_format("dx_row2", index, sum_squares(dx) * x_own)
            self._add_format("dx_col2", index, sum_squares(dx_wgrad) * x_own)
            self._add_format("dg_row2", index, sum_squares(dg_dgrad) * g_own)
            self._add_format("dg_col2", index, sum_squares(dg_wgrad) * g_own)
            if first:
                self._add_format("dw2", index, sum_squares(dw))
            # G_t·E_t with E = δX·Wᵀ + Q(X)·δWᵀ: through D and G·δW, so that nothing is the small difference of two
            # large numbers and the output is never formed. Partial over tensor parallel ranks either way.
            dots.append((d_local.float() * dx).sum(1) + ((g.float() @ dw) * qx).sum(1))
            dx_cols.append(sum_squares(dx_wgrad, 0))
            dg_cols.append(sum_squares(dg_wgrad, 0))
            self._record_output_error(index, qx, qw, w)
        self.dots.append(torch.stack(dots))
        self.dx_cols = _plus(self.dx_cols, torch.stack(dx_cols))
        self.dg_cols = _plus(self.dg_cols, torch.stack(dg_cols))

    def _record_output_error(self, index: int, qx: torch.Tensor, qw: torch.Tensor, w: torch.Tensor) -> None:
        if self.handle.parallel != "column":
            return
        sample = self._samples[-1]
        rows = sample_rows(qx.shape[0], self.sample_tokens).to(qx.device)
        error = qx[rows] @ qw.t() - sample.x.float() @ w.float().t()
        self._add_format("e2", index, sum_squares(error) * sample.weight)

    def _quantize_g(self, g: torch.Tensor, fmt: str, gemm: Gemm, axis: int, amax: torch.Tensor | None) -> torch.Tensor:
        """Q(G) with the very bits that training would draw for this microbatch."""
        context = self.handle.context
        microbatch = (self.handle.backwards - 1) * context.dp_size + context.dp_rank
        return fake_quantize(
            g,
            fmt,
            axis=axis,
            rounding="stochastic" if fmt in FOUR_BIT else "nearest",
            seed=derive_seed(context.seed, context.step, microbatch, self.handle.index, GEMM_INDEX[gemm]),
            cols=self.handle.out_features,
            tensor_amax=amax,
        )

    # -- noise passes ------------------------------------------------------------------------------------------
    def _compare(self, x: torch.Tensor, g: torch.Tensor) -> None:
        sample = self._samples[self._compared]
        self._compared += 1
        rows = sample_rows(x.shape[0], self.sample_tokens).to(x.device)
        column = self.handle.parallel == "column"
        x_own, g_own = (self._once, 1.0) if column else (1.0, self._once)
        dg2 = sum_squares(g[rows].float() - sample.g.float()) * sample.weight * g_own
        if self.phase is Pass.BACKWARD_NOISE:
            self._add("bg2", dg2)
            return
        self._add("fg2", dg2)
        self._add("fx2", sum_squares(x[rows].float() - sample.x.float()) * sample.weight * x_own)

    # -- accumulation ------------------------------------------------------------------------------------------
    def _add(self, name: str, value: torch.Tensor) -> None:
        self.sums[name] = _plus(self.sums.get(name), value)

    def _add_format(self, name: str, index: int, value: torch.Tensor) -> None:
        if name not in self.by_format:
            self.by_format[name] = torch.zeros(len(self.formats), dtype=torch.float64, device=value.device)
        self.by_format[name][index] += value


def _plus(total: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    return value if total is None else total + value


@contextmanager
def attached(recorders: list[LinearRecorder]) -> Iterator[None]:
    """Attach recorders to their linears for a probe; detached again whatever happens."""
    try:
        for recorder in recorders:
            recorder.handle.recorder = recorder
        yield
    finally:
        for recorder in recorders:
            recorder.handle.recorder = None

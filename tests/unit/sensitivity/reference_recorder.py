"""Every column of a StatisticsTable, computed from whole tensors by its very definition: what a recorder must equal.

No sampling of tokens, no shards, one pass a probe. All tokens of the batch count as sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from snip_megatron.precision import LinearRow
from snip_megatron.statistics.table import (
    BOUNDARY_COLUMNS,
    FORMAT_COLUMNS,
    LINEAR_COLUMNS,
    RHO_GRID,
    SinkRow,
    StatisticsTable,
)

from .small_llama import Stream, Trained, adamw_direction, normalised, quantise

NOISE = 0.03
SEED = 99


def square(x: Tensor) -> float:
    """‖x‖² in float64."""
    return float(x.double().pow(2).sum())


@dataclass
class Pass:
    """One probe pass: operands of every linear, the residual stream, gradients by parameter name."""

    x: dict[str, Tensor]
    g: dict[str, Tensor]
    h: list[Tensor]
    r: list[Tensor]
    final_gradient: Tensor  # ∂L/∂ of the final norm's output
    grads: dict[str, Tensor]


def probe(trained: Trained, tokens: Tensor, labels: Tensor, **noise: dict[int, Tensor]) -> Pass:
    """Forward and backward in full precision; ``noise`` goes to :class:`Stream`."""
    model, linears = trained.model, trained.model.linears()
    for linear in linears.values():
        linear.record = {}
    stream = Stream(**noise)
    model.zero_grad()
    model.loss(tokens, labels, stream).backward()
    records = {name: linear.record or {} for name, linear in linears.items()}
    for linear in linears.values():
        linear.record = None
    boundaries = range(2 * len(model.blocks) + 1)
    return Pass(
        x={n: r["x"] for n, r in records.items()},
        g={n: r["g"] for n, r in records.items()},
        h=[stream.activations[b].flatten(0, 1) for b in boundaries],
        r=[stream.gradients[b].flatten(0, 1) for b in boundaries],
        final_gradient=stream.final_gradient.flatten(0, 1),
        grads={n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
    )


def relative_noise(like: Tensor, shape: torch.Size, seed: int) -> Tensor:
    """Gaussian noise of NOISE times the RMS of ``like``."""
    z = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return z * like.pow(2).mean().sqrt() * NOISE


def tabulate_drift(
    gradient: Tensor, scale: Tensor, update: Callable[[Tensor], Tensor], generator: torch.Generator
) -> list[float]:
    """‖u(g + ρ·s∘z) − u(g)‖² on RHO_GRID with one normal z."""
    z, base = torch.randn(gradient.shape, generator=generator), update(gradient)
    return [square(update(gradient + float(rho) * scale * z) - base) for rho in RHO_GRID]


def record(
    trained: Trained,
    tokens: Tensor,
    labels: Tensor,
    *,
    formats: tuple[str, ...] = ("fp8", "fp4"),
    steps_share: float = 1.0,
) -> StatisticsTable:
    """One update's statistics. ``steps_share`` is tokens of the probe over tokens of a training step."""
    base = probe(trained, tokens, labels)
    shape = torch.Size((*tokens.shape, base.h[0].shape[-1]))
    forward = probe(trained, tokens, labels, forward_noise={0: relative_noise(base.h[0], shape, 3)})
    top = 2 * len(trained.model.blocks)
    backward = probe(trained, tokens, labels, backward_noise={top: relative_noise(base.r[top], shape, 4)})
    names = list(trained.model.linears())
    generator = torch.Generator().manual_seed(SEED)
    linear: dict[str, list[float]] = {c: [] for c in LINEAR_COLUMNS}
    by_format: dict[str, list[list[float]]] = {c: [] for c in FORMAT_COLUMNS}
    drift2, rows = [], []
    for name in names:
        one = _Linear(trained, name, base, steps_share, generator)
        for column, value in {**one.columns(), **one.changes(base, forward, backward)}.items():
            linear[column].append(value)
        columns = [one.format_columns(fmt) for fmt in formats]
        for column in FORMAT_COLUMNS:
            by_format[column].append([c[column] for c in columns])
        drift2.append(tabulate_drift(one.grad, one.scale, one.update, generator))
        rows.append(LinearRow(name, 0, *one.w.shape))
    sinks, sink_drift2, sink_w2 = _sinks(trained, tokens, base, steps_share, generator)
    count = tokens.numel()
    return StatisticsTable(
        step=trained.next_step,
        tokens=count,
        tokens_per_step=round(count / steps_share),
        formats=formats,
        linears=tuple(rows),
        sinks=sinks,
        linear={c: np.array(v) for c, v in linear.items()},
        by_format={c: np.array(v) for c, v in by_format.items()},
        boundary=_boundaries(base, forward, backward),
        drift2=np.array(drift2),
        sink_drift2=np.array(sink_drift2),
        sink_w2=np.array(sink_w2),
    )


class _Linear:
    """Statistics of one linear of a probe pass."""

    def __init__(self, trained: Trained, name: str, base: Pass, steps_share: float, generator: torch.Generator) -> None:
        self.module = trained.model.linears()[name]
        parameter = next(n for n, p in trained.model.named_parameters() if p is self.module.weight)
        self.name, self.generator, self.steps_share = name, generator, steps_share
        self.w, self.x, self.g = self.module.weight.detach(), base.x[name], base.g[name]
        self.grad, self.moments, self.step = base.grads[parameter], trained.moments[parameter], trained.next_step
        self.s2 = float((self.g.double().pow(2).sum(1) * self.x.double().pow(2).sum(1)).sum())
        flat = torch.outer(self.g.pow(2).sum(0), self.x.pow(2).sum(0)).sqrt()
        self.scale = flat / flat.norm() * (self.s2 * steps_share) ** 0.5  # ‖scale‖² = s2 of one step

    def update(self, gradient: Tensor) -> Tensor:
        return adamw_direction(gradient, self.moments, self.step)

    def columns(self) -> dict[str, float]:
        return {
            "x2": square(self.x),
            "w2": square(self.w),
            "y2": square(self.x @ self.w.t()),
            "g2": square(self.g),
            "d2": square(self.g @ self.w),
            "gw2": square(self.grad),
            "gv2": 0.0,  # of one microbatch: no variance to see
            "s2": self.s2,
            "m2": square(self.moments[0]),
            "v2": square(self.moments[1]),
            "xs2": square(self.x),
            "gs2": square(self.g),
        }

    def changes(self, base: Pass, forward: Pass, backward: Pass) -> dict[str, float]:
        return {
            "fx2": square(forward.x[self.name] - base.x[self.name]),
            "fg2": square(forward.g[self.name] - base.g[self.name]),
            "bg2": square(backward.g[self.name] - base.g[self.name]),
        }

    def format_columns(self, fmt: str) -> dict[str, float]:
        x_row, x_col = quantise(self.x, fmt, "rows"), quantise(self.x, fmt, "columns")
        g_row, g_col = quantise(self.g, fmt, "rows", SEED), quantise(self.g, fmt, "columns", SEED + 1)
        w = quantise(self.w, fmt, "block")
        e = x_row @ w.t() - self.x @ self.w.t()
        sigma = self._wgrad_sigma(g_col - self.g, x_col - self.x)
        z = torch.randn(sigma.shape, generator=self.generator)
        moved = self.update(self.grad + sigma * z) - self.update(self.grad)
        return {
            "dx_row2": square(x_row - self.x),
            "dx_col2": square(x_col - self.x),
            "dw2": square(w - self.w),
            "dg_row2": square(g_row - self.g),
            "dg_col2": square(g_col - self.g),
            "e2": square(e),
            "c2": float((self.g.double() * e.double()).sum(1).pow(2).sum()),
            "wdrift2": square(moved),
            "wsigma2": square(sigma),
        }

    def _wgrad_sigma(self, dg: Tensor, dx: Tensor) -> Tensor:
        """σ_nk = sqrt((‖δG_:n‖²‖X_:k‖² + ‖G_:n‖²‖δX_:k‖²)/T) of the probe, brought to one step."""
        g, x = self.g.pow(2).sum(0), self.x.pow(2).sum(0)
        probe2 = (torch.outer(dg.pow(2).sum(0), x) + torch.outer(g, dx.pow(2).sum(0))) / self.x.shape[0]
        return (probe2 * self.steps_share).sqrt()


def _boundaries(base: Pass, forward: Pass, backward: Pass) -> dict[str, np.ndarray]:
    columns: dict[str, list[float]] = {c: [] for c in BOUNDARY_COLUMNS}
    last = len(base.h) - 1
    for b, (h, r) in enumerate(zip(base.h, base.r, strict=True)):
        dh = forward.h[b] - h
        values = {
            "h2": square(h),
            "r2": square(r),
            "branch_h2": square(base.h[b + 1] - h) if b < last else 0.0,
            "branch_r2": square(r - base.r[b + 1]) if b < last else 0.0,
            "cn2": float((r.double() * dh.double()).sum(1).pow(2).sum()),
            "fh2": square(dh),
            "fr2": square(forward.r[b] - r),
            "br2": square(backward.r[b] - r),
        }
        for column, value in values.items():
            columns[column].append(value)
    return {c: np.array(v) for c, v in columns.items()}


def _sinks(
    trained: Trained, tokens: Tensor, base: Pass, steps_share: float, generator: torch.Generator
) -> tuple[tuple[SinkRow, ...], list[list[float]], list[float]]:
    """The embedding and the norms' weights; ‖s‖² of an element is the sum of its squared per-token gradients."""
    parameters = dict(trained.model.named_parameters())
    rows, drifts, sizes = [], [], []
    for name, parameter, boundary, s2 in _sink_noise(trained, tokens, base):
        weight, moments = parameters[parameter].detach(), trained.moments[parameter]
        scale = (s2 * steps_share).sqrt()

        def update(gradient: Tensor, moments: tuple[Tensor, Tensor] = moments) -> Tensor:
            return adamw_direction(gradient, moments, trained.next_step)

        rows.append(SinkRow(name, boundary, weight.numel()))
        drifts.append(tabulate_drift(base.grads[parameter], scale, update, generator))
        sizes.append(square(weight))
    return tuple(rows), drifts, sizes


def _sink_noise(trained: Trained, tokens: Tensor, base: Pass) -> list[tuple[str, str, int, Tensor]]:
    """(global name, parameter, boundary, Σ_t squared per-token gradient) of every sink."""
    embedding = torch.zeros_like(trained.model.embedding.weight.detach())
    embedding.index_add_(0, tokens.flatten(), base.r[0].pow(2))
    found = [("embedding.word_embeddings", "embedding.weight", 0, embedding)]
    linears = trained.model.linears()
    for layer in range(len(trained.model.blocks)):
        for offset, norm, reader in (
            (0, "input_layernorm", "self_attention.linear_qkv"),
            (1, "pre_mlp_layernorm", "mlp.linear_fc1"),
        ):
            name, boundary = f"decoder.layers.{layer}.{reader}", 2 * layer + offset
            d = base.g[name] @ linears[name].weight.detach()
            s2 = (d * normalised(base.h[boundary])).pow(2).sum(0)
            found.append((f"decoder.layers.{layer}.{norm}", f"blocks.{layer}.{norm}.weight", boundary, s2))
    s2 = (base.final_gradient * normalised(base.h[-1])).pow(2).sum(0)
    found.append(("decoder.final_layernorm", "final_layernorm.weight", len(base.h) - 1, s2))
    return found

"""The truth by brute force: force each option alone and read what it does to the loss and to AdamW's update."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from snip_megatron.precision import Gemm
from snip_megatron.sensitivity.divergence import first_order
from snip_megatron.statistics.table import StatisticsTable

from .reference_recorder import probe
from .small_llama import Trained, adamw_direction

Batch = tuple[Tensor, Tensor]


def gradients(trained: Trained, microbatches: Sequence[Batch], seed: int = 0) -> dict[str, Tensor]:
    """Mean gradient by parameter name, without the head's: it reads the last norm, no option moves it by itself."""
    trained.model.zero_grad()
    for index, (tokens, labels) in enumerate(microbatches):
        for linear in trained.model.linears().values():
            linear.seed = 1000 * seed + index
        (trained.model.loss(tokens, labels) / len(microbatches)).backward()
    named = trained.model.named_parameters()
    return {n: p.grad.clone() for n, p in named if p.grad is not None and n != "head.weight"}


def relative_drift(trained: Trained, base: dict[str, Tensor], moved: dict[str, Tensor]) -> float:
    """Σ over parameters of ‖u(g') − u(g)‖/‖W‖, u AdamW's next update."""
    total = 0.0
    for name, weight in trained.model.named_parameters():
        if name in base:
            before, after = (adamw_direction(g[name], trained.moments[name], trained.next_step) for g in (base, moved))
            total += ((after - before).norm() / weight.detach().norm()).item()
    return total


def true_drift(
    trained: Trained, microbatches: Sequence[Batch], fmt: str, seeds: Sequence[int] = (11, 12)
) -> np.ndarray:
    """Drift of every option forced alone, float64 [linears, 3], for a step of ``microbatches``.

    Stochastic rounding is averaged over ``seeds``.
    """
    base = gradients(trained, microbatches)
    linears = list(trained.model.linears().values())
    truth = np.zeros((len(linears), len(Gemm)))
    for i, linear in enumerate(linears):
        for j, gemm in enumerate(Gemm):
            draws = seeds[:1] if gemm is Gemm.FPROP else seeds
            linear.formats = {gemm.value: fmt}
            drifts = [relative_drift(trained, base, gradients(trained, microbatches, seed)) for seed in draws]
            linear.formats = {}
            truth[i, j] = np.mean(drifts)
    return truth


def true_loss_change(trained: Trained, batches: Sequence[Batch], fmt: str) -> np.ndarray:
    """Mean change of the loss by every fprop forced alone, float64 [linears], less the first-order term ⟨G, E⟩.

    On few tokens ⟨G, E⟩ dominates the change although its mean over the data vanishes (how-it-works.md, ``measured``).
    """
    linears = trained.model.linears()
    truth = np.zeros(len(linears))
    for tokens, labels in batches:
        base = probe(trained, tokens, labels)
        with torch.no_grad():
            reference = trained.model.loss(tokens, labels).item()
            for i, (name, linear) in enumerate(linears.items()):
                linear.formats = {"fprop": fmt}
                change = trained.model.loss(tokens, labels).item() - reference
                error = linear.output(base.x[name]) - base.x[name] @ linear.weight.t()
                truth[i] += change - float((base.g[name].double() * error.double()).sum())
                linear.formats = {}
    return truth / len(batches)


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation of two arrays without ties."""
    ranks = [np.argsort(np.argsort(np.ravel(x))).astype(float) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def from_norms(table: StatisticsTable, formats: Sequence[str]) -> np.ndarray:
    """(T/2)·ΔL₁², an estimate of ΔL₂ from norms alone."""
    return 0.5 * table.tokens * first_order(table, formats) ** 2

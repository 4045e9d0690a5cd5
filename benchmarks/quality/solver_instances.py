"""Seeded problems of the size of 70B and 405B Llamas, as a training run would build them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from snip_megatron.precision import LINEAR_KINDS, Format, Gemm
from snip_megatron.solver import Budget, Choice, Item, Problem

TOKENS = 4e6  # of a step
TOLERANCE = 0.02
SPEEDUPS = {
    Format.BF16: 1.0,
    Format.FP8: 1.4,
    Format.FP4: 1.9,
    Format.FP8_TENSOR: 1.65,
    Format.NVFP4: 2.4,
    Format.MXFP4: 2.2,
}
"""Typical speed of a GEMM relative to BF16. Every (linear kind, GEMM, format) has its own, which varies by 12 %."""
LOSSES = {
    Format.BF16: 0.0,
    Format.FP8: 0.02,
    Format.FP4: 1.0,
    Format.FP8_TENSOR: 0.05,
    Format.NVFP4: 0.5,
    Format.MXFP4: 0.8,
}
CANDIDATES = {
    2: (Format.FP8, Format.FP4),
    3: (Format.BF16, Format.FP8, Format.FP4),
    6: (Format.BF16, Format.FP8, Format.FP4, Format.FP8_TENSOR, Format.NVFP4, Format.MXFP4),
}


@dataclass(frozen=True)
class Model:
    """The sizes of a Llama, and its pipeline."""

    name: str
    blocks: int
    stages: int
    hidden: int
    ffn: int
    kv_share: float

    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(n, k) of the four linears."""
        h = self.hidden
        return (int(h * (1 + 2 * self.kv_share)), h), (h, h), (2 * self.ffn, h), (h, self.ffn)


MODELS = (Model("70b", 80, 8, 8192, 28672, 1 / 8), Model("405b", 126, 16, 16384, 53248, 1 / 16))


def instance(model: Model, formats: int, seed: int) -> Problem:
    """Return one problem at granularity ``gemm``.

    Losses are heavy-tailed (log-normal over four decades), larger for fprop, fc2 and the first and last blocks, and
    rounded to four digits as in a run. With two formats, costs are FLOPs and the target is 75 % in fp4. With more
    formats, costs are seconds and the target is three quarters of what the fastest formats would save.
    """
    rng = np.random.default_rng(seed)
    candidates = CANDIDATES[formats]
    n = model.blocks * 12
    block = np.repeat(np.arange(model.blocks), 12)
    kind = np.tile(np.repeat(np.arange(4), 3), model.blocks)
    gemm = np.tile(np.arange(3), model.blocks * 4)
    cost = np.array([2.0 * TOKENS * a * b for a, b in model.shapes()])[kind]
    share = np.tile([0.0, 1.0], (n, 1))
    target = 0.75
    if formats > 2:
        speed = np.array([SPEEDUPS[f] for f in candidates]) * np.exp(rng.normal(0, 0.12, (4, 3, formats)))
        speed[..., 0] = 1.0
        share = (1 - 1 / np.maximum(speed, 1.0))[kind, gemm]
        cost = cost / 6e14 * np.exp(rng.normal(0, 0.1, (4, 3)))[kind, gemm]
        target = 0.75 * float((share.max(axis=1) * cost).sum() / cost.sum())
    depth = 1 + 0.8 * np.exp(-block / 4) + 0.5 * np.exp((block + 1 - model.blocks) / 4)
    weight = np.array([1, 0.6, 1.5, 2.5])[kind] * np.array([10, 3, 1])[gemm] * depth
    loss = 1e-5 * weight * np.exp(rng.normal(0, 1.5, n))
    losses = loss[:, None] * np.array([LOSSES[f] for f in candidates]) * np.exp(rng.normal(0, 0.3, (n, formats)))
    items = tuple(
        Item(
            id=f"decoder.layers.{block[i]}.{LINEAR_KINDS[kind[i]]}:{list(Gemm)[gemm[i]].value}",
            stage=int(block[i] * model.stages // model.blocks),
            cost=float(cost[i]),
            choices=tuple(
                Choice(f, (float(f"{losses[i, j]:.4g}"),), float(share[i, j] * cost[i])) for j, f in enumerate(candidates)
            ),
        )
        for i in range(n)
    )
    return Problem(Budget(target, TOLERANCE), items)


def granular(items: int, seed: int) -> Problem:
    """Return a problem with a choice for every block of a weight.

    It has many items with few different costs, heavy-tailed losses and eight stages.
    """
    rng = np.random.default_rng(seed)
    cost = rng.choice([5.0, 4.0, 28.0, 14.0], items) * 1e9
    loss = np.exp(rng.normal(0, 2, items))
    rows = zip(cost.tolist(), loss.tolist(), strict=True)
    return Problem(
        Budget(0.55, TOLERANCE),
        tuple(
            Item(
                f"block.{i}",
                i * 8 // items,
                c,
                (Choice(Format.BF16, (0.0,), 0.0), Choice(Format.FP8, (0.02 * x,), 0.5 * c), Choice(Format.FP4, (x,), 0.75 * c)),
            )
            for i, (c, x) in enumerate(rows)
        ),
    )

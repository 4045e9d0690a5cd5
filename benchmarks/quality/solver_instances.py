"""Seeded problems of the size of 70B and 405B Llamas, as a training run would build them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from snip_megatron.precision import DENSE_LAYER, Format, Gemm
from snip_megatron.precision.budget import Budget
from snip_megatron.sensitivity.request import carried_weights
from snip_megatron.solver import Choice, Item, Phase, Problem

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
            id=f"decoder.layers.{block[i]}.{DENSE_LAYER[kind[i]]}:{list(Gemm)[gemm[i]].value}",
            stage=int(block[i] * model.stages // model.blocks),
            cost=float(cost[i]),
            choices=tuple(
                Choice(f, (float(f"{losses[i, j]:.4g}"),), float(share[i, j] * cost[i]))
                for j, f in enumerate(candidates)
            ),
        )
        for i in range(n)
    )
    return Problem(Budget("fp4", target), items, stage_tolerance=TOLERANCE)


def granular(items: int, seed: int) -> Problem:
    """Return a problem with a choice for every block of a weight.

    It has many items with few different costs, heavy-tailed losses and eight stages.
    """
    rng = np.random.default_rng(seed)
    cost = rng.choice([5.0, 4.0, 28.0, 14.0], items) * 1e9
    loss = np.exp(rng.normal(0, 2, items))
    rows = zip(cost.tolist(), loss.tolist(), strict=True)
    return Problem(
        Budget("fp4", 0.55),
        tuple(
            Item(
                f"block.{i}",
                i * 8 // items,
                c,
                (
                    Choice(Format.BF16, (0.0,), 0.0),
                    Choice(Format.FP8, (0.02 * x,), 0.5 * c),
                    Choice(Format.FP4, (x,), 0.75 * c),
                ),
            )
            for i, (c, x) in enumerate(rows)
        ),
        stage_tolerance=TOLERANCE,
    )


STEPS = (250, 125, 75, 50)
STANDING = 0.8
STRUCTURES = {
    "run": "losses as a run has them: κ · q of a falling learning rate, a standing part of fprops in the last phase",
    "bf16": "κ · q alone: deployed in bf16",
    "independent": "every loss of every phase with a factor of its own (log-normal, σ 1)",
    "equal": "a constant learning rate, deployed in bf16: all phases alike",
}


def phased_instance(structure: str, seed: int) -> Problem:
    """Return a problem of 70B: 960 items, bf16, fp8 and fp4, 8 stages, four phases."""
    static = instance(MODELS[0], 3, seed)
    begins = [sum(STEPS[:p]) for p in range(len(STEPS))]
    cosine = [1 + math.cos(math.pi * i / 100) for i in range(101)]
    carried = carried_weights(0, begins, sum(STEPS), [1.0] if structure == "equal" else cosine)
    rng = np.random.default_rng([seed, 7])

    def losses(item: str, loss: float) -> tuple[float, ...]:
        if structure == "independent":
            return tuple(
                float(f"{loss * n / sum(STEPS) * x:.4g}") for n, x in zip(STEPS, rng.lognormal(0, 1, 4), strict=True)
            )
        share = STANDING if structure == "run" and item.endswith(":fprop") else 0.0
        stands = (0.0, 0.0, 0.0, 1.0)
        return tuple(loss * (share * s + (1 - share) * c) for s, c in zip(stands, carried, strict=True))

    items = tuple(
        replace(i, choices=tuple(replace(c, losses=losses(i.id, c.loss)) for c in i.choices)) for i in static.items
    )
    return replace(static, items=items, phases=tuple(Phase(n) for n in STEPS))


def timed(problem: Problem, kind: str, value: float) -> Problem:
    """Return the problem with a budget of time; its costs are taken as seconds."""
    return replace(problem, budget=Budget(kind, value), stage_tolerance=None)

"""The part of a GEMM's error that stays in the loss at the end of training: a standing part and a carried part.

The standing part is the rounding error of the current forward. It disappears soon after the fprop runs in a precise
format. It counts in full if the model is deployed in the formats of the last phase. If it is deployed in bf16, a small
part of it counts, because the weights have adapted to the rounded forward. The carried part is what imprecise steps
leave in the weights. A step leaves more the higher its learning rate is, and later steps may repair some of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from snip_megatron.errors import SnipError, cut

STANDING_SHARE = 0.8
"""Share of an fprop's loss that disappears once the fprop is precise, the default of ``--snip-standing-share``.

It was fitted to runs of a 26 M model whose fprops become precise late; .82 fits best
(``tests/unit/sensitivity/test_persistence.py``). Another estimate is .81: what all-fp4 loses by its own formats alone,
(.01077 − .00293), divided by the loss of its fprops, .0097.
"""

STANDING_WEIGHTS: Mapping[str, float] = {"map": 1.0, "bf16": 0.15}
"""Weight of the standing part in the last phase, by the formats in which the model is deployed.

Weights that were trained with a rounded forward lose in bf16 too, and recover within some tens of precise steps. In
runs of a 26 M model, .09 to .16 of an fprop's loss is of this kind, .12 to .2 of its standing part
(``benchmarks/results/quality/compare_26m-time_2xh200_2026-11-22.md`` and the runs of ``STANDING_SHARE``).
"""

FORGETTING = 0.0
"""Rate at which later training repairs the carried part, the default of ``--snip-forgetting``.

The same runs do not determine this rate. Values up to about 5 fit as well, with a smaller standing share.
"""

_GRID = 4096  # points of the integral over a run


def carried_weights(
    origin: int, begins: Sequence[int], end: int, rates: Sequence[float], forgetting: float = FORGETTING
) -> tuple[float, ...]:
    """Return the weight κ of the carried loss of every phase.

    κ of a phase is ∫ η(t) · exp(−forgetting · r(t)) dt over its steps, divided by ∫ η dt over the run. η is the
    learning rate and r(t) its part of the run's ∫ η dt that lies after t. Without forgetting, the phases of a whole run
    sum to 1.

    Args:
        origin: first step of the run.
        begins: first step of each phase, ascending, from ``origin`` on. A phase ends where the next begins.
        end: the step before which the run ends.
        rates: learning rates at evenly spaced times, the first at ``origin``, the last at ``end``; in any unit. One
            stands for a constant rate.
        forgetting: repair per run's worth of learning rate, 0 or more.

    Raises:
        SnipError: the steps are not ascending, or the rates are not finite numbers of which one is above 0.
    """
    steps = [origin, *begins, end]
    if not begins or any(b < a for a, b in pairwise(steps)) or end <= origin:
        raise SnipError(f"phases at {cut(tuple(begins))}: must ascend within the run from step {origin} to {end}")
    sampled = np.array(rates, dtype=np.float64)
    if not len(sampled) or not np.all(np.isfinite(sampled)) or (sampled < 0).any():
        raise SnipError(f"learning rates {cut(tuple(rates))}: must be finite numbers, 0 or more")
    if not (sampled > 0).any():
        raise SnipError("learning rates: one of the run must be above 0")
    edges = (np.array([*begins, end], dtype=np.float64) - origin) / (end - origin)
    grid = np.union1d(np.linspace(0.0, 1.0, _GRID), edges)
    rate = np.interp(grid, np.linspace(0.0, 1.0, max(len(sampled), 2)), np.resize(sampled, max(len(sampled), 2)))
    before = _integral(grid, rate)
    density = rate * np.exp(-forgetting * (before[-1] - before) / before[-1])
    carried = _integral(grid, density) / before[-1]
    at = np.interp(edges, grid, carried)
    return tuple(float(b - a) for a, b in pairwise(at))


def _integral(grid: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return ∫ values from the grid's first point to each of its points, by trapezoids."""
    return np.concatenate([[0.0], np.cumsum(np.diff(grid) * (values[1:] + values[:-1]) / 2)])

"""How well each estimator's scores follow what forcing options alone measured (EVALUATION, proxy validation)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from snip_megatron.errors import SnipError
from snip_megatron.precision import Gemm, option_id, split_option_id
from snip_megatron.reporting.readers import STEP_FILES, step_of
from snip_megatron.sensitivity.loss_divergence import FloatArray, first_order
from snip_megatron.sensitivity.policies import divergences, policy_scores
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.sensitivity.scores import OptionScore, option_scores, truth
from snip_megatron.statistics.table import StatisticsTable

QUANTITIES = ("loss", "drift: all", *(f"drift: {gemm.value}" for gemm in Gemm))
"""Loss over fprop options only: dgrad and wgrad have none. Drift pooled and within each GEMM kind."""
TARGETS = {"loss": 0.95, "drift: all": 0.95, "drift: fprop": 0.75, "drift: dgrad": 0.9, "drift: wgrad": 0.9}
"""Wanted Spearman of the default estimator; within NEAR of the ceiling is as good."""
NEAR = 0.03
CEILING = "ceiling"
DEFAULT = "noise"
_FEWEST = 3

Scores = Mapping[str, float]


@dataclass(frozen=True)
class Comparison:
    """One estimator against the truth in one quantity. ``rho``: Spearman over ``options`` options.

    ``trusted_rho``: over the ``trusted`` ones whose measured value stands above rounding noise. None: too few.
    """

    quantity: str
    estimator: str
    rho: float | None
    options: int
    trusted_rho: float | None
    trusted: int


@dataclass(frozen=True)
class Validation:
    """One statistics table. ``points``: quantity's kind (``loss``, ``drift``) → option → estimator → score.

    ``measured`` and ``measured again`` are among the estimators of ``points``.
    """

    source: str
    step: int
    tokens: int
    fmt: str
    comparisons: tuple[Comparison, ...]
    points: Mapping[str, Mapping[str, Mapping[str, float]]]

    def of(self, quantity: str, estimator: str) -> Comparison | None:
        """The comparison of that name."""
        found = (c for c in self.comparisons if (c.quantity, c.estimator) == (quantity, estimator))
        return next(found, None)

    def met(self, quantity: str) -> bool | None:
        """Whether the default estimator reaches the target, or the ceiling but for NEAR; None: not known."""
        ours, ceiling = self.of(quantity, DEFAULT), self.of(quantity, CEILING)
        if ours is None or ours.rho is None:
            return None
        limit = TARGETS[quantity]
        if ceiling is not None and ceiling.rho is not None:
            limit = min(limit, ceiling.rho - NEAR)
        return ours.rho >= limit

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "source": self.source,
            "step": self.step,
            "tokens": self.tokens,
            "format": self.fmt,
            "comparisons": [vars(comparison) for comparison in self.comparisons],
            "met": {quantity: self.met(quantity) for quantity in QUANTITIES},
            "points": self.points,
        }


def find_tables(source: Path) -> list[Path]:
    """Statistics files of a run directory by step, or the file that ``source`` is. Raises SnipError."""
    if source.is_file():
        return [source]
    folder = source / "stats"
    steps = {step: path for path in folder.glob("*.npz") if (step := step_of(path, STEP_FILES["stats"])) is not None}
    if not steps:
        raise SnipError(f"{source}: no run directory with statistics (stats/step_<N>.npz), and no statistics file")
    return [steps[step] for step in sorted(steps)]


def validate(table: StatisticsTable, fmt: str, source: str) -> Validation:
    """Every estimator and error rule against ``table.measured`` in ``fmt``. Raises SnipError where that is missing."""
    base = SolveRequest(formats=(fmt,))
    true = truth(table, fmt)
    columns: dict[str, dict[str, OptionScore]] = {
        name: option_scores(table, replace(base, estimator=name), fmt) for name in ("noise", "fisher")
    }
    if float(table.linear["bg2"].sum()) > 0.0:
        columns["noise with backward noise"] = option_scores(table, replace(base, backward_noise=True), fmt)
    columns |= _rules(table, base)
    if table.measured_again is not None:
        columns[CEILING] = truth(table, fmt, again=True)
    comparisons = [
        _compare(quantity, name, scores, true) for quantity in QUANTITIES for name, scores in columns.items()
    ]
    points = {kind: _points(kind, true, columns) for kind in ("loss", "drift")}
    return Validation(source, table.step, table.tokens, fmt, tuple(c for c in comparisons if c), points)


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Rank correlation; None for fewer than three values, or where one side does not vary."""
    if len(x) < _FEWEST or np.ptp(x) == 0.0 or np.ptp(y) == 0.0:
        return None
    rho = float(stats.spearmanr(x, y).statistic)
    return rho if math.isfinite(rho) else None


def _rules(table: StatisticsTable, base: SolveRequest) -> dict[str, dict[str, OptionScore]]:
    """The scores that other methods use, each as proxy of both quantities: METHOD's rows."""
    loss, weight = divergences(table, replace(base, estimator="fisher"))
    arrays: dict[str, FloatArray] = {"first-order loss": first_order(table, base.formats)}
    for policy in ("min-abs-err", "min-rel-err"):
        arrays[policy] = policy_scores(table, replace(base, policy=policy), loss, weight)
    return {
        name: {
            option_id(row.name, gemm): OptionScore(float(a[i, j, 0]), float(a[i, j, 0]))
            for i, row in enumerate(table.linears)
            for j, gemm in enumerate(Gemm)
        }
        for name, a in arrays.items()
    }


def _value(kind: str) -> Callable[[OptionScore], float]:
    return (lambda s: s.delta_loss) if kind == "loss" else (lambda s: s.delta_drift)


def _selects(quantity: str) -> Callable[[str], bool]:
    """Which options a quantity is compared over."""
    kind, _, gemm = quantity.partition(": ")
    wanted = Gemm.FPROP.value if kind == "loss" else gemm
    return lambda option: wanted == "all" or split_option_id(option)[1] == Gemm(wanted)


def _compare(
    quantity: str, name: str, scores: Mapping[str, OptionScore], true: Mapping[str, OptionScore]
) -> Comparison | None:
    """None where the estimator does not have the quantity (no weight divergence in ``fisher``)."""
    kind = quantity.partition(": ")[0]
    value, selects = _value(kind), _selects(quantity)
    options = [option for option in true if option in scores and selects(option)]
    if not options or not any(value(scores[option]) for option in options):
        return None
    above = [option for option in options if _trusted(kind, true[option]) and _trusted(kind, scores[option])]
    rho, trusted_rho = (
        spearman([value(scores[o]) for o in chosen], [value(true[o]) for o in chosen]) for chosen in (options, above)
    )
    return Comparison(quantity, name, rho, len(options), trusted_rho, len(above))


def _trusted(kind: str, score: OptionScore) -> bool:
    return score.loss_trusted if kind == "loss" else score.drift_trusted


def _points(
    kind: str, true: Mapping[str, OptionScore], columns: Mapping[str, Mapping[str, OptionScore]]
) -> dict[str, dict[str, float]]:
    value, wanted = _value(kind), _selects("loss" if kind == "loss" else "drift: all")
    points: dict[str, dict[str, float]] = {}
    for option in true:
        if wanted(option):
            others = {name: value(scores[option]) for name, scores in columns.items() if option in scores}
            again = others.pop(CEILING, None)
            points[option] = {"measured": value(true[option])} | others
            if again is not None:
                points[option]["measured again"] = again
    return points

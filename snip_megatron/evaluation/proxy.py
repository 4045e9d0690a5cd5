"""Rank correlation between each estimator's scores and measured sensitivities (docs/method.md, definitions).

The sensitivity of an option is measured by forcing only this option to the candidate format.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from snip_megatron.errors import SnipError
from snip_megatron.precision import Gemm, option_id, split_option_id
from snip_megatron.records.readers import step_files
from snip_megatron.sensitivity.loss_divergence import FloatArray, first_order
from snip_megatron.sensitivity.policies import ESTIMATORS, divergences, policy_scores
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.sensitivity.scores import OptionScore, option_scores, truth
from snip_megatron.statistics.table import StatisticsTable

QUANTITIES = ("loss", "drift: all", *(f"drift: {gemm.value}" for gemm in Gemm))
"""Compared quantities. ``loss`` covers fprop options only, since dgrad and wgrad do not change the loss of the same
step. ``drift`` (weight divergence) covers all options, or those of one GEMM."""
CEILING = "ceiling"
DEFAULT = "noise"
_FEWEST = 3

Scores = Mapping[str, OptionScore]
"""Option → score."""


@dataclass(frozen=True)
class Comparison:
    """The correlation of one estimator with the measurement in one quantity.

    Attributes:
        quantity: one of QUANTITIES.
        estimator: the estimator's name.
        rho: Spearman correlation over all options; None if there are too few.
        options: number of options.
        trusted_rho, trusted: the same over the options whose value is above rounding noise.
    """

    quantity: str
    estimator: str
    rho: float | None
    options: int
    trusted_rho: float | None
    trusted: int


@dataclass(frozen=True)
class Validation:
    """The validation of all estimators on one statistics table.

    Attributes:
        source: name of the table's run or file.
        step: training step of the table.
        tokens: number of tokens of the measurement.
        format: the candidate format.
        comparisons: the correlations.
        points: ``loss`` or ``drift`` → option → estimator → score. ``measured`` and ``measured again`` are included as
            estimators.
    """

    source: str
    step: int
    tokens: int
    format: str
    comparisons: tuple[Comparison, ...]
    points: Mapping[str, Mapping[str, Mapping[str, float]]]

    def of(self, quantity: str, estimator: str) -> Comparison | None:
        """Return the comparison of an estimator in a quantity, or None if there is none."""
        found = (c for c in self.comparisons if (c.quantity, c.estimator) == (quantity, estimator))
        return next(found, None)

    @property
    def estimators(self) -> list[str]:
        """The names of all estimators: the ceiling first, then the default estimator."""
        names = dict.fromkeys(comparison.estimator for comparison in self.comparisons)
        return sorted(names, key=lambda name: (name != CEILING, name != DEFAULT))

    def as_dict(self) -> dict[str, Any]:
        """Return the validation as JSON types."""
        return dataclasses.asdict(self)


def find_tables(source: Path) -> list[Path]:
    """Return the statistics files of a run directory in the order of their steps, or ``source`` itself if it is a file.

    Raises:
        SnipError: ``source`` is neither a file nor a run directory with statistics.
    """
    if source.is_file():
        return [source]
    found = list(step_files(source, "stats").values())
    if not found:
        raise SnipError(f"{source}: no run directory with statistics (stats/step_<N>.npz), and no statistics file")
    return found


def validate(table: StatisticsTable, fmt: str, source: str) -> Validation:
    """Compare every estimator and every rule of other methods with ``table.measured``.

    Args:
        table: the statistics.
        fmt: the candidate format.
        source: name of the table's run or file.

    Raises:
        SnipError: the table holds no measurement of ``fmt``.
    """
    base = SolveRequest(formats=(fmt,))
    true = truth(table, fmt)
    columns: dict[str, Scores] = {
        name: option_scores(table, replace(base, estimator=name), fmt) for name in ESTIMATORS if name != "measured"
    }
    if float(table.linear["bg2"].sum()) > 0.0:
        columns["noise with backward noise"] = option_scores(table, replace(base, backward_noise=True), fmt)
    columns |= _rules(table, base)
    if table.measured_again is not None:
        columns[CEILING] = truth(table, fmt, again=True)
    comparisons = [_compare(quantity, name, own, true) for quantity in QUANTITIES for name, own in columns.items()]
    points = {quantity: _points(quantity, true, columns) for quantity in ("loss", "drift")}
    return Validation(source, table.step, table.tokens, fmt, tuple(c for c in comparisons if c), points)


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, or None for fewer than three values or if one side is constant."""
    if len(x) < _FEWEST or np.ptp(x) == 0.0 or np.ptp(y) == 0.0:
        return None
    rho = float(stats.spearmanr(x, y).statistic)
    return rho if math.isfinite(rho) else None


def _rules(table: StatisticsTable, base: SolveRequest) -> dict[str, Scores]:
    """Return the scores of other methods' rules. Each rule serves as a proxy of both loss and drift."""
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


def _value(quantity: str, score: OptionScore) -> float:
    return score.delta_loss if quantity == "loss" else score.delta_drift


def _trusted(quantity: str, score: OptionScore) -> bool:
    return score.loss_trusted if quantity == "loss" else score.drift_trusted


def _covers(quantity: str, option: str) -> bool:
    """Return whether a quantity covers an option."""
    wanted = Gemm.FPROP.value if quantity == "loss" else quantity.partition(": ")[2]
    return wanted in ("", "all") or split_option_id(option)[1] == Gemm(wanted)


def _compare(quantity: str, name: str, scores: Scores, true: Scores) -> Comparison | None:
    """Compare one estimator in one quantity.

    Returns None if the estimator does not predict the quantity, such as weight divergence for ``fisher``.
    """
    options = [option for option in true if option in scores and _covers(quantity, option)]
    if not any(_value(quantity, scores[option]) for option in options):
        return None
    above = [o for o in options if _trusted(quantity, true[o]) and _trusted(quantity, scores[o])]
    rho, trusted_rho = (
        spearman([_value(quantity, scores[o]) for o in chosen], [_value(quantity, true[o]) for o in chosen])
        for chosen in (options, above)
    )
    return Comparison(quantity, name, rho, len(options), trusted_rho, len(above))


def _points(quantity: str, true: Scores, columns: Mapping[str, Scores]) -> dict[str, dict[str, float]]:
    shown = {"measured": true} | {"measured again" if name == CEILING else name: own for name, own in columns.items()}
    return {
        option: {name: _value(quantity, scores[option]) for name, scores in shown.items() if option in scores}
        for option in true
        if _covers(quantity, option)
    }

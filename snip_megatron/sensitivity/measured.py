"""The estimator ``measured``: scores from options that were forced alone (docs/method.md, "Estimators").

An option that was not measured, or whose value is below the rounding noise of the training dtype, gets a *prior*: the
score of the cheap estimator (ΔL₂, or the recipe's ΔW) times the median ratio of measured to cheap scores over the
options that the update renewed (*ours*).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from snip_megatron.errors import SnipError
from snip_megatron.precision import Gemm
from snip_megatron.sensitivity.loss_divergence import FPROP, FloatArray, of_formats
from snip_megatron.statistics.measured import Measured
from snip_megatron.statistics.table import StatisticsTable

TRUST = 2.0
"""A change of the loss is trusted from this multiple of the rounding noise on, a drift from √2 times its floor on."""

BoolArray = NDArray[np.bool_]


def loss_noise(measured: Measured) -> float:
    """Return the rounding noise of a measured ΔL in nats: the root mean square over nudges, or 0 if there are none."""
    nudges = measured["loss_floor"][:, FPROP][measured.known[:, FPROP]]
    return float(np.sqrt(np.mean(nudges**2))) if len(nudges) else 0.0


def trusted(measured: Measured) -> tuple[BoolArray, BoolArray]:
    """Return (ΔL, ΔW): which options were measured and are above the rounding noise, bool [linears, 3, formats]."""
    known = measured.known
    loss = known & (np.abs(measured_loss(measured)) >= TRUST * loss_noise(measured))
    drift = known & (measured["raw_drift"] ** 2 >= 2.0 * measured["floor"] ** 2)
    return loss, drift


def measured_loss(measured: Measured) -> FloatArray:
    """Return ΔL − ⟨G, E⟩ in nats, float64 [linears, 3, formats]. It is 0 if not measured, and for dgrad and wgrad."""
    values: FloatArray = measured["loss"] - measured["first_order"]
    return values


def measured_divergences(
    table: StatisticsTable,
    formats: Sequence[str],
    prior_loss: FloatArray,
    prior_drift: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Return (ΔL in nats, ΔW) of every option, float64 [linears, 3, formats].

    Args:
        table: a table with measured columns.
        formats: formats of the request. bf16 has no error.
        prior_loss, prior_drift: scores of the cheap estimator, [linears, 3, formats].

    Raises:
        SnipError: the table has no measured columns, or was recorded without one of the formats.
    """
    measured = _of_table(table)
    filled = _Filled(table, measured, formats)
    loss_trusted, drift_trusted = trusted(measured)
    expected = filled.scaled(measured_loss(measured), loss_trusted, prior_loss)
    drift = filled.scaled(measured["drift"], drift_trusted, prior_drift)
    return (
        filled.weighed(measured_loss(measured), loss_noise(measured), expected),
        filled.chosen(measured["drift"], drift_trusted, drift),
    )


def measured_variance(table: StatisticsTable, formats: Sequence[str], prior: FloatArray) -> FloatArray:
    """Return the gradient variance that every option adds, as :func:`measured_divergences` does for ΔW.

    ``prior`` is that of the recipe. Raises SnipError as :func:`measured_divergences` does.
    """
    measured = _of_table(table)
    filled = _Filled(table, measured, formats)
    _, drift_trusted = trusted(measured)
    expected = filled.scaled(measured["variance"], drift_trusted, prior)
    return filled.chosen(measured["variance"], drift_trusted, expected)


def _of_table(table: StatisticsTable) -> Measured:
    if table.measured is None:
        raise SnipError(
            f"the statistics of step {table.step} hold nothing measured; record them with --snip-estimator measured"
        )
    return table.measured


class _Filled:
    """Measured values and those of the cheap estimator, [linears, 3, formats] in the order of a request's formats."""

    def __init__(self, table: StatisticsTable, measured: Measured, formats: Sequence[str]) -> None:
        self._table = table
        self._formats = formats
        self._known = of_formats(table, measured.known, formats)
        self._fresh = self._known & (of_formats(table, measured["step"], formats) == table.step)

    def scaled(self, values: FloatArray, trust: BoolArray, prior: FloatArray) -> FloatArray:
        """Return ``prior`` times the median ratio of values to prior, by GEMM and format.

        The median is over all options that were renewed, including those that are not trusted: the trusted ones alone
        are biased upwards. If most options of a format are below the noise, it gets the median ratio of the other
        formats, or 1 if there is none.
        """
        values, trust = of_formats(self._table, values, self._formats), of_formats(self._table, trust, self._formats)
        expected = np.array(prior)
        for gemm in range(len(Gemm)):
            columns = [(slice(None), gemm, column) for column in range(len(self._formats))]
            ratios = [self._ratio(values[at], self._usable(at, prior), trust[at], prior[at]) for at in columns]
            found = [ratio for ratio in ratios if ratio is not None]
            default = float(np.median(found)) if found else 1.0
            for at, ratio in zip(columns, ratios, strict=True):
                expected[at] = prior[at] * (default if ratio is None else ratio)
        return expected

    def _usable(self, at: tuple[slice, int, int], prior: FloatArray) -> BoolArray:
        """Return which options a ratio can be formed of: those of this update if it renewed any, otherwise all that are
        known.
        """
        known, fresh = (flags[at] & (prior[at] > 0.0) for flags in (self._known, self._fresh))
        usable: BoolArray = fresh if fresh.any() else known
        return usable

    @staticmethod
    def _ratio(values: FloatArray, usable: BoolArray, trust: BoolArray, prior: FloatArray) -> float | None:
        if not usable.any() or np.mean(trust[usable]) < 0.5:
            return None
        ratio = float(np.median(values[usable] / prior[usable]))
        return ratio if ratio > 0.0 else None

    def chosen(self, values: FloatArray, trust: BoolArray, expected: FloatArray) -> FloatArray:
        """Return the measured value where it is trusted, otherwise the expected one."""
        values, trust = of_formats(self._table, values, self._formats), of_formats(self._table, trust, self._formats)
        return np.where(trust, values, expected)

    def weighed(self, values: FloatArray, noise: float, expected: FloatArray) -> FloatArray:
        """Return the mean of measured and expected values, weighted by their precision.

        The noise of a measured value is the same for all options. The error of an expected value is taken to be as
        large as the value itself. So without noise the result is the measured value; for a value far below the noise it
        is the expected one.
        """
        values = of_formats(self._table, values, self._formats)
        of_value, of_expected = expected**2, np.full_like(values, noise**2)
        total = of_value + of_expected
        mean = (of_value * values + of_expected * expected) / np.where(total > 0.0, total, 1.0)
        return np.where(self._known, np.where(total > 0.0, mean, values), expected)

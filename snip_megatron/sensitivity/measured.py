"""The estimator ``measured``: scores from options that were forced alone (METHOD, "Estimators").

What is not measured, or drowns in the rounding noise of the training dtype, is filled in from the cheap estimator (ΔL₂;
the recipe's ΔW), brought to the measured scale by the median ratio of the two over what the update renewed (*ours*).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from snip_megatron.errors import SnipError
from snip_megatron.precision import Gemm
from snip_megatron.sensitivity.loss_divergence import FPROP, FloatArray
from snip_megatron.statistics.measured import Measured
from snip_megatron.statistics.table import StatisticsTable

TRUST = 2.0
"""A change of the loss is trusted from this many times the rounding noise on; a drift, from √2 times its floor on."""

BoolArray = NDArray[np.bool_]


def loss_noise(measured: Measured) -> float:
    """What rounding does to a measured ΔL, nats: the root mean square of what nudges did; 0 where none is known."""
    nudges = measured["loss_floor"][:, FPROP][measured.known[:, FPROP]]
    return float(np.sqrt(np.mean(nudges**2))) if len(nudges) else 0.0


def trusted(measured: Measured) -> tuple[BoolArray, BoolArray]:
    """(ΔL, ΔW): which options were measured and stand above the rounding noise, bool [linears, 3, formats]."""
    known = measured.known
    loss = known & (np.abs(measured_loss(measured)) >= TRUST * loss_noise(measured))
    drift = known & (measured["raw_drift"] ** 2 >= 2.0 * measured["floor"] ** 2)
    return loss, drift


def measured_loss(measured: Measured) -> FloatArray:
    """ΔL − ⟨G, E⟩ in nats, float64 [linears, 3, formats]; 0 where unknown, and for dgrad and wgrad."""
    values: FloatArray = measured["loss"] - measured["first_order"]
    return values


def measured_divergences(
    table: StatisticsTable,
    formats: Sequence[str],
    prior_loss: FloatArray,
    prior_drift: FloatArray,
    measured: Measured | None = None,
) -> tuple[FloatArray, FloatArray]:
    """(ΔL in nats, ΔW) of every option, float64 [linears, 3, formats].

    Args:
        table: with measured columns.
        formats: the request's; bf16 among them has no error.
        prior_loss, prior_drift: of the cheap estimator, [linears, 3, formats].
        measured: instead of ``table.measured``, for example ``table.measured_again``.

    Raises:
        SnipError: the table holds no measured columns, or was recorded without one of the formats.
    """
    measured = _of_table(table) if measured is None else measured
    filled = _Filled(table, measured, formats)
    loss_trusted, drift_trusted = trusted(measured)
    expected = filled.scaled(measured_loss(measured), loss_trusted, prior_loss)
    drift = filled.scaled(measured["drift"], drift_trusted, prior_drift)
    return (
        filled.weighed(measured_loss(measured), loss_noise(measured), expected),
        filled.chosen(measured["drift"], drift_trusted, drift),
    )


def measured_variance(table: StatisticsTable, formats: Sequence[str], prior: FloatArray) -> FloatArray:
    """Gradient variance added by every option, as :func:`measured_divergences` has ΔW, with ``prior`` from the recipe.

    Raises SnipError as that does.
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


def of_formats[T: np.generic](table: StatisticsTable, values: NDArray[T], formats: Sequence[str]) -> NDArray[T]:
    """Columns [linears, 3, formats] in the order of ``formats``; zero for bf16. Raises SnipError on another format."""
    missing = [f for f in formats if f not in table.formats and f != "bf16"]
    if missing:
        raise SnipError(
            f"the statistics of step {table.step} hold no {missing[0]} (only {', '.join(table.formats)});"
            " record them with the same candidate formats"
        )
    zeros = np.zeros(values.shape[:2], dtype=values.dtype)
    return np.stack([values[:, :, table.formats.index(f)] if f in table.formats else zeros for f in formats], axis=2)


class _Filled:
    """Measured values beside the cheap estimator's, [linears, 3, formats] in the order of a request's formats."""

    def __init__(self, table: StatisticsTable, measured: Measured, formats: Sequence[str]) -> None:
        self._table = table
        self._formats = formats
        self._known = of_formats(table, measured.known, formats)
        self._fresh = self._known & (of_formats(table, measured["step"], formats) == table.step)

    def scaled(self, values: FloatArray, trust: BoolArray, prior: FloatArray) -> FloatArray:
        """``prior`` times the median ratio of values to it, by GEMM and format.

        The median is over everything that was renewed, the untrusted too: those that happen to stand out of the noise
        are the too large ones. A format most of which drowns has the ratio of the others; without any it is 1.
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
        """What a ratio can be formed of: of this update where it renewed any."""
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
        """The trusted as measured, the rest as expected."""
        values, trust = of_formats(self._table, values, self._formats), of_formats(self._table, trust, self._formats)
        return np.where(trust, values, expected)

    def weighed(self, values: FloatArray, noise: float, expected: FloatArray) -> FloatArray:
        """Measured and expected, each by its precision: the noise is one for all options, and what is expected may be
        wrong by as much as itself. Without noise the measured value, where much smaller than noise what is expected."""
        values = of_formats(self._table, values, self._formats)
        of_value, of_expected = expected**2, np.full_like(values, noise**2)
        total = of_value + of_expected
        mean = (of_value * values + of_expected * expected) / np.where(total > 0.0, total, 1.0)
        return np.where(self._known, np.where(total > 0.0, mean, values), expected)

"""The estimator ``measured``: scores from options that were forced alone (METHOD, "Estimators").

An option that has not been measured yet, or whose effect drowns in the rounding noise of the training dtype, has the
score of the cheap estimator (ΔL₂; the recipe's ΔW), brought to the measured scale by the median ratio of the two over
the options of its GEMM and format that were measured (*ours*).
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
"""A change of the loss counts from this many times the rounding noise on; a drift, from √2 times its floor on: more
signal than noise in either."""

BoolArray = NDArray[np.bool_]


def trusted(measured: Measured) -> tuple[BoolArray, BoolArray]:
    """(ΔL, ΔW): which options were measured and stand above the rounding noise, bool [linears, 3, formats].

    The noise of ΔL is one number for all: the root mean square of what nudges did to the loss.
    """
    known = measured.known
    nudges = measured["loss_floor"][:, FPROP][known[:, FPROP]]
    noise = float(np.sqrt(np.mean(nudges**2))) if len(nudges) else 0.0
    loss = known & (np.abs(measured["loss"] - measured["first_order"]) >= TRUST * noise)
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
    loss_known, drift_known = (of_formats(table, values, formats) for values in trusted(measured))
    loss, drift, step = (
        of_formats(table, values, formats) for values in (measured_loss(measured), measured["drift"], measured["step"])
    )
    fresh = step == table.step
    return (
        _with_prior(loss, loss_known, fresh, prior_loss),
        _with_prior(drift, drift_known, fresh, prior_drift),
    )


def measured_variance(table: StatisticsTable, formats: Sequence[str], prior: FloatArray) -> FloatArray:
    """Gradient variance added by every option, as :func:`measured_divergences` has ΔW, with ``prior`` from the recipe.

    Raises SnipError as that does.
    """
    measured = _of_table(table)
    _, known = trusted(measured)
    values, known, fresh = (
        of_formats(table, array, formats) for array in (measured["variance"], known, measured["step"] == table.step)
    )
    return _with_prior(values, known, fresh, prior)


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


def _with_prior(values: FloatArray, known: BoolArray, fresh: BoolArray, prior: FloatArray) -> FloatArray:
    """``values`` where known; elsewhere the prior times the median ratio of the two, over what this update renewed."""
    filled = np.array(values)
    for gemm in range(len(Gemm)):
        for column in range(values.shape[2]):
            at = (slice(None), gemm, column)
            ratio = _ratio(values[at], known[at], fresh[at], prior[at])
            filled[at] = np.where(known[at], values[at], prior[at] * ratio)
    return filled


def _ratio(values: FloatArray, known: BoolArray, fresh: BoolArray, prior: FloatArray) -> float:
    usable = known & (prior > 0.0) & (values > 0.0)
    chosen = usable & fresh if (usable & fresh).any() else usable
    return float(np.median(values[chosen] / prior[chosen])) if chosen.any() else 1.0

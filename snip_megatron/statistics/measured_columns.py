"""Computes the measured columns of the statistics table from the readings of a measurement. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from snip_megatron.precision import Gemm, LinearId
from snip_megatron.statistics.measured import Measured
from snip_megatron.statistics.measured_schedule import Trial, Unit, all_units
from snip_megatron.statistics.table import StatisticsTable

FloatArray = NDArray[np.float64]
_GEMM = {gemm: index for index, gemm in enumerate(Gemm)}


@dataclass(frozen=True)
class Readings:
    """Reduced readings, float64, the same on all ranks (see
    :class:`~snip_megatron.optimizers.measured_reader.MeasuredReader`).

    Attributes:
        trials: the trials.
        drift2: [sizes of δ, trials, owners]. The sizes are 1 and, if a step has more tokens than the probe, √(T /
            tokens of a step).
        norm2, noise2: [trials, owners].
        natural2: [owners].
        loss, first_order: [trials].
        repeated: whether there were several microbatches. Only then does ``noise2`` carry information.
    """

    trials: tuple[Trial, ...]
    drift2: FloatArray
    norm2: FloatArray
    noise2: FloatArray
    natural2: FloatArray
    loss: FloatArray
    first_order: FloatArray
    repeated: bool


def step_share(readings: Readings, variance: float) -> FloatArray:
    """Return E‖δ of a step‖² / ‖δ of the probe‖², [trials, owners].

    The share is ``variance`` if no part of δ repeats in other microbatches, because δ then averages out. It is 1 if all
    of δ repeats (docs/method.md). With a single microbatch, δ is assumed not to repeat.

    Args:
        readings: of one measurement.
        variance: tokens of the probe / tokens of a step.
    """
    norm2 = readings.norm2
    noise = np.clip(readings.noise2, 0.0, norm2) if readings.repeated else norm2
    share: FloatArray = 1.0 - (1.0 - variance) * noise / np.where(norm2 > 0.0, norm2, 1.0)
    return share


def step_drift2(readings: Readings, variance: float) -> FloatArray:
    """Return ‖u(g + δ) − u(g)‖² of a training step, [trials, owners]. Interpolates log-linearly
    between the sizes of δ.
    """
    if len(readings.drift2) == 1 or variance >= 1.0:
        drift2: FloatArray = readings.drift2[0]
        return drift2
    whole, averaged = readings.drift2
    towards = np.log(step_share(readings, variance)) / np.log(variance)
    positive = (whole > 0.0) & (averaged > 0.0)
    logs = [np.log(np.where(positive, values, 1.0)) for values in (whole, averaged)]
    return np.where(positive, np.exp(logs[0] + towards * (logs[1] - logs[0])), 0.0)


def measured_columns(readings: Readings, table: StatisticsTable, natural_noise2: FloatArray) -> Measured:
    """Return the columns of all options that ``readings`` has trials of. The other options stay unknown.

    Args:
        readings: readings of one measurement.
        table: table of the same update.
        natural_noise2: Var(∇W) of the gradient of that update's probe, [linears].
    """
    measured = Measured.nothing(len(table.linears), table.formats)
    sums = _Sums(readings, table, natural_noise2)
    nudges = {Unit(t.layer, t.gemm): i for i, t in enumerate(readings.trials) if t.format is None}
    row_of = {row.name: i for i, row in enumerate(table.linears)}
    for i, trial in enumerate(readings.trials):
        if trial.format is None:
            continue
        for name in trial.linears:
            at = (row_of[name], _GEMM[trial.gemm], table.formats.index(trial.format.value))
            if trial.gemm is Gemm.WGRAD:
                values = sums.own(i, row_of[name])
            else:
                nudge = nudges[Unit(trial.layer, trial.gemm)]
                values = sums.all(i, nudge)
                if trial.gemm is Gemm.FPROP:
                    values |= {
                        "loss": readings.loss[i],
                        "first_order": readings.first_order[i],
                        "loss_floor": abs(readings.loss[nudge]),
                    }
            for column, value in (values | {"step": table.step}).items():
                measured[column][at] = value
    return measured


class _Sums:
    """Sums over owners of the effects of trials, relative to the size of each owner."""

    def __init__(self, readings: Readings, table: StatisticsTable, natural_noise2: FloatArray) -> None:
        variance = min(1.0, table.tokens / table.tokens_per_step)
        w2 = np.concatenate([table.linear["w2"], table.sink_w2])
        self._drift2 = step_drift2(readings, variance) / np.where(w2 > 0.0, w2, np.inf)
        numbers = np.array([row.elements for row in table.linears] + [float(row.numel) for row in table.sinks])
        # The noise of the sinks is known only if the probe had several microbatches; that of the linears always.
        natural = np.concatenate([natural_noise2, readings.natural2[len(table.linears) :]]) * variance
        weights = numbers / numbers.sum() / np.where(natural > 0.0, natural, np.inf)
        self._variance = readings.norm2 * step_share(readings, variance) * weights

    def all(self, trial: int, nudge: int) -> dict[str, float]:
        """Return sums over all owners. The effect of the nudge is subtracted in quadrature, because it is rounding
        noise.
        """
        raw = self._drift2[trial]
        floor = np.minimum(self._drift2[nudge], raw)
        variance = np.maximum(self._variance[trial] - self._variance[nudge], 0.0)
        return {
            "drift": float(np.sqrt(raw - floor).sum()),
            "raw_drift": float(np.sqrt(raw).sum()),
            "floor": float(np.sqrt(floor).sum()),
            "variance": float(variance.sum()),
        }

    def own(self, trial: int, row: int) -> dict[str, float]:
        """Return the sums of one linear, for wgrad: its GEMM accumulates in FP32 and affects nothing else."""
        drift = float(np.sqrt(self._drift2[trial, row]))
        return {"drift": drift, "raw_drift": drift, "variance": float(self._variance[trial, row])}


def measured_at(names: Sequence[str], measured: Measured | None) -> dict[Unit, float]:
    """Return unit → step at which it was measured, −1 for never. The next units to renew follow from it."""
    steps = dict.fromkeys(all_units(names), -1.0)
    if measured is not None:
        for i, name in enumerate(names):
            for gemm in (Gemm.FPROP, Gemm.DGRAD):
                unit = Unit(LinearId.parse(name).layer, gemm)
                steps[unit] = max(steps[unit], float(measured["step"][i, _GEMM[gemm]].max()))
    return steps

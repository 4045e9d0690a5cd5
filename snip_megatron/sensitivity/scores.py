"""ΔL and ΔW of every option by any estimator, from one stored table: what ``snip validate-proxy`` compares."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from snip_megatron.errors import SnipError, quoted
from snip_megatron.precision import Gemm, option_id
from snip_megatron.sensitivity.loss_divergence import FloatArray, of_formats
from snip_megatron.sensitivity.measured import measured_loss, trusted
from snip_megatron.sensitivity.policies import ESTIMATORS, divergences
from snip_megatron.sensitivity.quality import in_lowest
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.statistics.measured import Measured
from snip_megatron.statistics.table import StatisticsTable


class OptionScore(NamedTuple):
    """Scores of one option in one format.

    Attributes:
        delta_loss: ΔL in nats; 0 for dgrad and wgrad.
        delta_drift: ΔW, a sum of relative changes of the optimizer's update; 0 if the estimator has no drift.
        loss_trusted, drift_trusted: whether a measured value is above the rounding noise. Always True for other
            estimators.
    """

    delta_loss: float
    delta_drift: float
    loss_trusted: bool = True
    drift_trusted: bool = True


def option_scores(table: StatisticsTable, request: SolveRequest, fmt: str | None = None) -> dict[str, OptionScore]:
    """Return option id (``<linear>:<gemm>``) → score in ``fmt`` by ``request.estimator``, as the solver gets it.

    With ``measured``, a value that is unknown or not trusted is the rescaled prior; :func:`truth` returns the bare
    measurement.

    Args:
        table: the statistics.
        request: the request.
        fmt: one of ``request.formats``. Default: the one with the fewest bits.

    Raises:
        SnipError: the table lacks what the estimator needs.
    """
    if request.estimator not in ESTIMATORS:
        raise SnipError(f"estimator {quoted(request.estimator)}: unknown; choose one of {', '.join(ESTIMATORS)}")
    loss, drift = divergences(table, replace(request, policy="snip"))
    if fmt is None:
        return _scores(table, in_lowest(request, loss), in_lowest(request, drift))
    column = request.formats.index(fmt)
    return _scores(table, loss[:, :, column], drift[:, :, column])


def truth(table: StatisticsTable, fmt: str, *, again: bool = False) -> dict[str, OptionScore]:
    """Return option id → measured values in ``fmt``. Options that were never measured are left out.

    With ``again`` returns the measurement on the second, disjoint batch, which is the ceiling of every estimator.
    Raises SnipError if the table has no such columns.
    """
    measured: Measured | None = table.measured_again if again else table.measured
    if measured is None:
        what = "--snip-measured-twice" if again else "--snip-estimator measured"
        raise SnipError(f"the statistics of step {table.step} hold no such measurement; record them with {what}")
    columns = (measured_loss(measured), measured["drift"])
    loss, drift = (of_formats(table, values, (fmt,))[:, :, 0] for values in columns)
    flags = tuple(of_formats(table, values, (fmt,))[:, :, 0] for values in (*trusted(measured), measured.known))
    scores = _scores(table, loss, drift)
    kept = {}
    for i, row in enumerate(table.linears):
        for j, gemm in enumerate(Gemm):
            loss_trusted, drift_trusted, known = (bool(flag[i, j]) for flag in flags)
            if known:
                key = option_id(row.name, gemm)
                kept[key] = scores[key]._replace(loss_trusted=loss_trusted, drift_trusted=drift_trusted)
    return kept


def _scores(table: StatisticsTable, loss: FloatArray, drift: FloatArray) -> dict[str, OptionScore]:
    return {
        option_id(row.name, gemm): OptionScore(float(loss[i, j]), float(drift[i, j]))
        for i, row in enumerate(table.linears)
        for j, gemm in enumerate(Gemm)
    }

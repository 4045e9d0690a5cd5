"""Rank correlation between each estimator's scores and measured sensitivities (docs/how-it-works.md, definitions).

The sensitivity of an option is measured by forcing only this option to the candidate format.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from benchmarks.quality.truth import Truth
from snip_megatron.precision import Gemm, option_id
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.run_data import step_files
from snip_megatron.sensitivity.divergence import FPROP, FloatArray, format_column, of_formats
from snip_megatron.sensitivity.policies import ESTIMATORS, divergences, policy_scores
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.sensitivity.table import StatisticsTable

QUANTITIES = ("loss", "drift: all", *(f"drift: {gemm.value}" for gemm in Gemm))
"""Compared quantities. ``loss`` covers fprop options only, since dgrad and wgrad do not change the loss of the same
step. ``drift`` (weight divergence) covers all options, or those of one GEMM."""
CEILING = "ceiling"
DEFAULT = "noise"
_FEWEST = 3
_Scores = Mapping[str, FloatArray]
"""``loss`` and ``drift`` of all options in one format, [linears, 3 GEMMs]. The loss of dgrad and wgrad is 0."""
_Trusted = Mapping[str, NDArray[np.bool_]]
"""Which of these are above rounding noise."""
_LOSS_TRUST, _DRIFT_TRUST = 2.0, 2.0
"""A change of the loss is trusted from this multiple of the rounding noise on; a squared drift from this multiple of
its squared floor on."""


@dataclass(frozen=True)
class Comparison:
    """The correlation of one estimator with the measurement in one of QUANTITIES.

    ``rho`` is Spearman's correlation over all ``options``, None if there are too few; ``trusted_rho`` and ``trusted``
    are the same over the options whose value is above rounding noise.
    """

    quantity: str
    estimator: str
    rho: float | None
    options: int
    trusted_rho: float | None
    trusted: int


@dataclass(frozen=True)
class Kind:
    """What the default estimator predicts for the linears of one kind, such as ``mlp.experts.linear_fc1``, and what was
    measured, in one of the first two QUANTITIES: sums over the options of this kind, and their Spearman correlation
    ``rho``, which is None for too few options.
    """

    kind: str
    quantity: str
    rho: float | None
    predicted: float
    measured: float


@dataclass(frozen=True)
class Validation:
    """The validation of all estimators on one statistics table: of a run or file ``source``, at a training step, over
    so many tokens, in the candidate format. ``kinds`` has the default estimator by kind of linear, ``points`` is
    ``loss`` or ``drift`` → option → estimator → score, ``measured`` and ``measured again`` among the estimators.
    """

    source: str
    step: int
    tokens: int
    format: str
    comparisons: tuple[Comparison, ...]
    kinds: tuple[Kind, ...]
    points: Mapping[str, Mapping[str, Mapping[str, float]]]

    def of(self, quantity: str, estimator: str) -> Comparison | None:
        matches = (c for c in self.comparisons if (c.quantity, c.estimator) == (quantity, estimator))
        return next(matches, None)

    @property
    def estimators(self) -> list[str]:
        """The names of all estimators: the ceiling first, then the default estimator."""
        names = dict.fromkeys(comparison.estimator for comparison in self.comparisons)
        return sorted(names, key=lambda name: (name != CEILING, name != DEFAULT))


def find_tables(source: Path) -> list[Path]:
    """Return the statistics files of a run directory in the order of their steps, or ``source`` itself if it is a file.

    Raises SnipError if ``source`` is neither a file nor a run directory with statistics.
    """
    if source.is_file():
        return [source]
    tables = list(step_files(source, "stats").values())
    if not tables:
        raise SnipError(f"{source}: no run directory with statistics (stats/step_<N>.npz), and no statistics file")
    return tables


def _estimated(loss: FloatArray, drift: FloatArray) -> _Scores:
    """Return the scores of an estimator, given [linears, 3, 1]. A drift of 0 means that it predicts none."""
    return {"loss": loss[:, :, 0], "drift": drift[:, :, 0]}


def _measured(table: StatisticsTable, truth: Truth, fmt: str) -> tuple[_Scores, _Trusted]:
    """Return what forcing each option alone did: ΔL in nats, ΔW as a sum of relative changes of the update.

    The noise of a loss is the root mean square over perturbations.
    """
    column = {name: of_formats(table, values, (fmt,))[:, :, 0] for name, values in truth.items()}
    noise = float(np.sqrt(np.mean(truth["loss_floor"][:, FPROP] ** 2)))
    drifted = column["raw_drift"] ** 2 >= _DRIFT_TRUST * column["floor"] ** 2
    trusted = {"loss": np.abs(column["loss"]) >= _LOSS_TRUST * noise, "drift": drifted}
    return {"loss": column["loss"], "drift": column["drift"]}, trusted


def validate(table: StatisticsTable, truth: Truth, again: Truth, fmt: str, source: str) -> Validation:
    """Compare every estimator and every rule of other methods with the truth in the candidate format ``fmt``.

    ``truth`` and ``again`` were measured at the step of ``table``, on two batches; ``source`` names the table's run or
    file. Raises SnipError if the table was recorded without ``fmt``.
    """
    base = SolveRequest(formats=(fmt,))
    true, trusted = _measured(table, truth, fmt)
    columns = {name: _estimated(*divergences(table, replace(base, estimator=name))) for name in ESTIMATORS}
    columns |= _rules(table, base)
    columns[CEILING], trusted_again = _measured(table, again, fmt)
    both = {kind: above & trusted_again[kind] for kind, above in trusted.items()}
    compared = [
        _compare(quantity, name, scores, true, both if name == CEILING else trusted)
        for quantity in QUANTITIES
        for name, scores in columns.items()
    ]
    points = {kind: _points(kind, table, true, columns) for kind in ("loss", "drift")}
    kinds = tuple(_kinds(table, columns[DEFAULT], true))
    return Validation(source, table.step, table.tokens, fmt, tuple(c for c in compared if c), kinds, points)


def spearman(x: FloatArray | Sequence[float], y: FloatArray | Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, or None for fewer than three values or if one side is constant."""
    if len(x) < _FEWEST or np.ptp(x) == 0.0 or np.ptp(y) == 0.0:
        return None
    rho = float(stats.spearmanr(x, y).statistic)
    return rho if math.isfinite(rho) else None


def _rules(table: StatisticsTable, base: SolveRequest) -> dict[str, _Scores]:
    """Return the scores of other methods' rules. Each rule serves as a proxy of both loss and drift."""
    loss, weight = divergences(table, replace(base, estimator="fisher"))
    arrays: dict[str, FloatArray] = {"first-order loss": first_order(table, base.formats)}
    for policy in ("min-abs-err", "min-rel-err"):
        arrays[policy] = policy_scores(table, replace(base, policy=policy), loss, weight)
    return {name: _estimated(values, values) for name, values in arrays.items()}


def _gemms(quantity: str) -> list[int]:
    kind, _, gemm = quantity.partition(": ")
    listed = Gemm.FPROP.value if kind == "loss" else gemm
    return [i for i, each in enumerate(Gemm) if listed in (each.value, "all")]


def _compare(quantity: str, name: str, scores: _Scores, true: _Scores, trusted: _Trusted) -> Comparison | None:
    """Compare one estimator in one quantity. Returns None if it does not predict this quantity."""
    kind, gemms = quantity.partition(": ")[0], _gemms(quantity)
    values, expected = (each[kind][:, gemms].ravel() for each in (scores, true))
    above = trusted[kind][:, gemms].ravel()
    if not values.any():
        return None
    rho, trusted_rho = spearman(values, expected), spearman(values[above], expected[above])
    return Comparison(quantity, name, rho, len(values), trusted_rho, int(above.sum()))


def _kinds(table: StatisticsTable, scores: _Scores, true: _Scores) -> Iterator[Kind]:
    """Yield the loss and the drift of every kind of linear. A kind stands in several blocks."""
    paths = [row.id.path for row in table.linears]
    for quantity in QUANTITIES[:2]:
        kind, gemms = quantity.partition(": ")[0], _gemms(quantity)
        for path in dict.fromkeys(paths):
            rows = [i for i, name in enumerate(paths) if name == path]
            values, expected = (each[kind][rows][:, gemms].ravel() for each in (scores, true))
            rho = spearman(values, expected)
            yield Kind(path, quantity, rho, float(values.sum()), float(expected.sum()))


def _points(
    kind: str, table: StatisticsTable, true: _Scores, columns: Mapping[str, _Scores]
) -> dict[str, dict[str, float]]:
    named = {"measured": true, **columns}
    named["measured again"] = named.pop(CEILING)
    return {
        option_id(row.name, list(Gemm)[j]): {name: float(scores[kind][i, j]) for name, scores in named.items()}
        for i, row in enumerate(table.linears)
        for j in _gemms("loss" if kind == "loss" else "drift: all")
    }


# -- tables -----------------------------------------------------------------------------------------------------------
def proxy_markdown(validations: Sequence[Validation]) -> str:
    """Return a page with a table of Spearman correlations for each validation."""
    parts = ["# Estimators against measured truth", "Spearman of each estimator's score to `measured`, over options."]
    for validation in validations:
        parts += [
            f"## {validation.source}, step {validation.step}, {validation.format}, {validation.tokens:,} tokens",
            _correlations(validation),
            _by_kind(validation),
        ]
    return "\n\n".join(parts) + "\n"


def _correlations(validation: Validation) -> str:
    names = validation.estimators
    lines = [f"| quantity | options | {' | '.join(names)} |", "|---|---" + "|---" * len(names) + "|"]
    for quantity in QUANTITIES:
        comparisons = [validation.of(quantity, name) for name in names]
        counts = [c for c in comparisons if c is not None]
        if counts:
            options = f"{counts[0].options} ({min(c.trusted for c in counts)} above noise)"
            cells = ["–" if c is None else _pair(c.rho, c.trusted_rho) for c in comparisons]
            lines.append(f"| {quantity} | {options} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _by_kind(validation: Validation) -> str:
    lines = [
        f"| kind of linear | quantity | {DEFAULT} | Σ predicted / Σ measured | Σ measured |",
        "|---|---|---|---|---|",
    ]
    for each in validation.kinds:
        ratio = f"{each.predicted / each.measured:.2f}" if each.measured > 0.0 else "–"
        cells = (each.kind, each.quantity, _pair(each.rho, None), ratio, f"{each.measured:.3g}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _pair(rho: float | None, trusted: float | None) -> str:
    """Format the correlation over all options, followed in brackets by that above rounding noise if it differs."""
    if rho is None:
        return "–"
    return f"{rho:.3f}" if trusted is None or abs(rho - trusted) < 5e-4 else f"{rho:.3f} ({trusted:.3f})"


def first_order(table: StatisticsTable, formats: Sequence[str]) -> FloatArray:
    """Return ΔL₁ = sqrt(‖D‖²‖δX‖²/(T·K) + ‖∇W‖²‖δW‖²/(N·K)), in nats, float64 [linears, 3, formats].

    ΔL₁ is the RMS of the first-order change. It decreases as 1/√T and is not additive, so it serves only to rank single
    options (docs/how-it-works.md).
    """
    n, k, active, experts = np.array([(row.n, row.k, row.active, row.experts) for row in table.linears], dtype=float).T
    from_x = (table.linear["d2"] / (table.tokens * active * k))[:, None] * format_column(table, "dx_row2", formats)
    from_w = (table.linear["gw2"] / (n * k * experts))[:, None] * format_column(table, "dw2", formats)
    scores = np.zeros((len(table.linears), len(Gemm), len(formats)))
    scores[:, FPROP] = np.sqrt(from_x + from_w)
    return scores

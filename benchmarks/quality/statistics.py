"""Statistics of a comparison: the recovered gap, and paired differences between policies (docs/how-it-works.md)."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.quality.experiment import VALIDATIONS

CONFIDENCE = 0.95
ALPHA = 0.05

Block = tuple[str | None, int]
"""The runs of a pair have the same block: hash of the warm weights (None for runs from scratch) and seed."""


@dataclass(frozen=True)
class Row:
    """One policy at one budget, the wanted fp4 share. None if the policy ignores it.

    Attributes:
        share: fp4 share of FLOPs, the mean over the runs of each run's mean over its steps. Records of earlier
            releases have only the last step's, which is the same under a map that does not change.
        gap: formats of validation → block → loss minus that of bf16.
        recovered: formats of validation → block → share of the gap that is recovered; see :func:`recovered`.
    """

    kind: str
    label: str
    budget: float | None
    share: float
    gap: Mapping[str, Mapping[Block, float]]
    recovered: Mapping[str, Mapping[Block, float]]


@dataclass(frozen=True)
class Difference:
    """The difference of recovered gap between two policies, over the blocks that both have: ours less theirs, by their
    labels.

    ``mean``, ``low`` and ``high`` are the mean difference and its 95 % confidence interval (Student's t), ``p`` and
    ``adjusted`` the two-sided p-value and the same by Holm's procedure over all differences of the table. They and the
    interval are None with fewer than two blocks.
    """

    ours: str
    theirs: str
    budget: float
    validation: str
    blocks: int
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    adjusted: float | None = None

    @property
    def verdict(self) -> str:
        """``better`` or ``worse`` if the adjusted p-value is below 5 %, else ``no difference shown``."""
        if self.adjusted is None or self.adjusted >= ALPHA:
            return "no difference shown"
        return "better" if self.mean > 0 else "worse"


def recovered(loss: float, bf16: float, fp4: float) -> float:
    """Return 1 − (loss − bf16) / (fp4 − bf16), the avoided share of the gap; NaN if fp4's loss is not above bf16's."""
    gap = fp4 - bf16
    return 1.0 - (loss - bf16) / gap if gap > 0.0 else math.nan


def latest(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the last run of each policy, budget and block; those before it had other settings."""
    return list({(e["kind"], e["label"], e["budget"], _block(e)): e for e in entries}.values())


def rows(entries: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Group runs into rows. Gaps need a run in bf16 in the same block, recovered shares one in uniform-fp4 too."""
    finished = [entry for entry in latest(entries) if entry["status"] == "done"]
    losses: dict[tuple[str, Block, str], Mapping[str, float]] = {}
    # Runs without a label of their own come first, and the first run is the reference.
    for entry in sorted(finished, key=lambda e: bool(e["label"] != e["policy"])):
        if entry["budget"] is None:
            losses.setdefault((entry["kind"], _block(entry), entry["policy"]), entry["validation"])
    groups: dict[tuple[str, str, float | None], list[Mapping[str, Any]]] = {}
    for entry in finished:
        groups.setdefault((entry["kind"], entry["label"], entry["budget"]), []).append(entry)
    return [_row(key, members, losses) for key, members in groups.items()]


def differences(table: Sequence[Row], planned: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Make the comparisons that an experiment announced. Their p-values are adjusted together.

    Announced comparisons without enough runs count in the adjustment: which ones fail or are still missing must not
    make the others significant.
    """
    by_map = {(row.kind, row.label, row.budget): row for row in table}
    pairs = []
    for plan in planned:
        for budget, theirs in itertools.product(plan["budgets"], plan["theirs"]):
            a = by_map.get((plan["kind"], plan["ours"], budget))
            fixed_map = by_map.get((plan["kind"], theirs, None))
            b = by_map.get((plan["kind"], theirs, budget), fixed_map)
            if a is not None and b is not None:
                pairs.append(_paired(a, b, budget, plan["validation"]))
    return _adjusted(pairs, planned_count(planned))


def planned_count(planned: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of comparisons that an experiment announced."""
    return sum(len(plan["budgets"]) * len(plan["theirs"]) for plan in planned)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted by Holm's step-down procedure (Holm 1979), in the order given."""
    order = np.argsort(p_values)
    steps = np.arange(len(p_values), 0, -1) * np.asarray(p_values)[order]
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return [float(p) for p in adjusted]


def paired(values: Sequence[float]) -> tuple[float, float, float, float]:
    """Return mean, ends of the 95 % confidence interval and two-sided p-value of differences (Student's t)."""
    mean = float(np.mean(values))
    if np.ptp(values) == 0.0:
        return mean, mean, mean, 1.0 if mean == 0.0 else 0.0
    test = stats.ttest_1samp(values, 0.0)
    interval = test.confidence_interval(CONFIDENCE)
    return mean, float(interval.low), float(interval.high), float(test.pvalue)


def _block(entry: Mapping[str, Any]) -> Block:
    return entry.get("warm_sha256"), int(entry["seed"])


def _row(
    key: tuple[str, str, float | None],
    members: Sequence[Mapping[str, Any]],
    losses: Mapping[tuple[str, Block, str], Mapping[str, float]],
) -> Row:
    gap: dict[str, dict[Block, float]] = {formats: {} for formats in VALIDATIONS}
    share: dict[str, dict[Block, float]] = {formats: {} for formats in VALIDATIONS}
    for entry in members:
        block = _block(entry)
        bf16, fp4 = losses.get((key[0], block, "bf16")), losses.get((key[0], block, "uniform-fp4"))
        if bf16 is None:
            continue
        for formats in VALIDATIONS:
            loss = float(entry["validation"][formats])
            gap[formats][block] = loss - float(bf16[formats])
            value = math.nan if fp4 is None else recovered(loss, float(bf16[formats]), float(fp4[formats]))
            if math.isfinite(value):
                share[formats][block] = value
    mean_share = float(np.mean([entry.get("average_share", entry["fp4_share"]) for entry in members]))
    return Row(*key, mean_share, gap, share)


def _paired(ours: Row, theirs: Row, budget: float, validation: str) -> Difference:
    a, b = ours.recovered[validation], theirs.recovered[validation]
    values = [a[block] - b[block] for block in a if block in b]
    if len(values) > 1:
        statistics: tuple[float, ...] = paired(values)
    else:
        statistics = (values[0] if values else math.nan,)
    return Difference(ours.label, theirs.label, budget, validation, len(values), *statistics)


def _adjusted(pairs: Sequence[Difference], family: int) -> list[Difference]:
    """Drop pairs without a common block, and adjust the others by Holm's procedure.

    Of a larger ``family``, the p-values that are not known count as 1.
    """
    measured = [each for each in pairs if each.blocks]
    values = [each.p for each in measured if each.p is not None]
    adjusted = iter(holm([*values, *[1.0] * (family - len(values))]))
    return [each if each.p is None else replace(each, adjusted=next(adjusted)) for each in measured]

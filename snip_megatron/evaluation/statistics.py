"""Statistics of a comparison: the recovered gap, and paired differences between policies (docs/method.md)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from snip_megatron.evaluation.planned import VALIDATIONS

CONFIDENCE = 0.95
ALPHA = 0.05
REFERENCE = "snip"
STRONGEST_RULE = "backward-first"
OTHERS = f"mean of the other policies but {STRONGEST_RULE}"

Block = tuple[str | None, int]
"""The runs of a pair have the same block: hash of the warm weights (None for runs from scratch) and seed."""


@dataclass(frozen=True)
class Row:
    """One policy at one budget.

    Attributes:
        kind: ``from_warm`` or ``from_scratch``.
        label: the policy's name in tables.
        budget: the wanted fp4 share; None if the policy ignores it.
        policy: the policy.
        share: fp4 share of FLOPs, the mean over the runs of each run's mean over its steps. Records of earlier
            releases have only the last step's, which is the same under a map that does not change.
        gap: formats of validation → block → loss minus that of bf16.
        recovered: formats of validation → block → share of the gap that is recovered; see :func:`recovered`.
        update_steps: median cost of an update in training steps of the same run; None without updates.
    """

    kind: str
    label: str
    budget: float | None
    policy: str
    share: float
    gap: Mapping[str, Mapping[Block, float]]
    recovered: Mapping[str, Mapping[Block, float]]
    update_steps: float | None = None


@dataclass(frozen=True)
class Difference:
    """The difference of recovered gap between two policies, over the blocks that both have.

    Attributes:
        ours: the label of the first policy.
        theirs: the label of the policy that is subtracted.
        budget: the wanted fp4 share; None for the mean over all budgets.
        blocks: the number of blocks.
        mean: the mean difference.
        low: lower end of the 95 % confidence interval of the mean (Student's t); None with fewer than two blocks.
        high: upper end of the interval.
        p: two-sided p-value; None with fewer than two blocks.
        adjusted: the p-value adjusted by Holm's procedure over all differences of the table.
        validation: formats of the validation.
    """

    ours: str
    theirs: str
    budget: float | None
    blocks: int
    mean: float
    low: float | None
    high: float | None
    p: float | None
    adjusted: float | None = None
    validation: str = "map"

    @property
    def verdict(self) -> str:
        """``better`` or ``worse`` if the adjusted p-value is below 5 %, else ``no difference shown``."""
        if self.adjusted is None or self.adjusted >= ALPHA:
            return "no difference shown"
        return "better" if self.mean > 0 else "worse"


def recovered(loss: float, bf16: float, fp4: float) -> float:
    """Return the share of the loss gap between bf16 and all-fp4 that a map avoids.

    It is 1 − (loss − bf16) / (fp4 − bf16), or NaN if fp4's loss is not above that of bf16.
    """
    gap = fp4 - bf16
    return 1.0 - (loss - bf16) / gap if gap > 0.0 else math.nan


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the sample standard deviation, which is NaN for a single value."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def latest(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the last run, done or failed, of each policy, budget and block.

    Those before it had other settings of the experiment file.
    """
    return list({(e["kind"], e["label"], e["budget"], _block(e)): e for e in entries}.values())


def rows(entries: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Group the runs of a result file into rows.

    A run has a gap if its block has a run in bf16, and a recovered share if it has one of uniform-fp4 as well.
    """
    done = [entry for entry in latest(entries) if entry["status"] == "done"]
    losses: dict[tuple[str, Block, str], Mapping[str, float]] = {}
    # Runs without a label of their own come first, and the first run is the reference.
    for entry in sorted(done, key=lambda e: bool(e["label"] != e["policy"])):
        if entry["budget"] is None:
            losses.setdefault((entry["kind"], _block(entry), entry["policy"]), entry["validation"])
    groups: dict[tuple[str, str, float | None], list[Mapping[str, Any]]] = {}
    for entry in done:
        groups.setdefault((entry["kind"], entry["label"], entry["budget"]), []).append(entry)
    return [_row(key, members, losses) for key, members in groups.items()]


def differences(table: Sequence[Row], kind: str, formats: str) -> list[Difference]:
    """Compare ``snip`` with every other policy at the same budget, and with the mean of most of them.

    The p-values of all differences are adjusted together.
    """
    found = []
    for ours in table:
        if ours.kind != kind or ours.label != REFERENCE or ours.budget is None:
            continue
        others = [r for r in table if r.kind == kind and r.budget == ours.budget and r.label != ours.label]
        mine = ours.recovered[formats]
        found += [_paired(other.label, ours.budget, mine, other.recovered[formats]) for other in others]
        rules = [r.recovered[formats] for r in others if r.policy not in (REFERENCE, STRONGEST_RULE)]
        if len(rules) > 1:
            blocks = [block for block in mine if all(block in rule for rule in rules)]
            mean = {block: float(np.mean([rule[block] for rule in rules])) for block in blocks}
            found.append(_paired(OTHERS, ours.budget, mine, mean))
    return _adjust([difference for difference in found if difference.blocks])


def overall(table: Sequence[Row], kind: str, formats: str) -> list[Difference]:
    """Compare ``snip`` with every other policy by each block's mean over the budgets.

    The mean reduces the noise, so that smaller differences become significant than at a single budget. Policies that
    lack one of ``snip``'s budgets are left out, and so are blocks that lack one. The p-values are adjusted together.
    Returns an empty list if there is only one budget.
    """
    own = [row for row in table if row.kind == kind and row.budget is not None]
    budgets = {row.budget for row in own if row.label == REFERENCE}
    if len(budgets) < 2:
        return []
    means: dict[str, dict[Block, float]] = {}
    for label in dict.fromkeys(row.label for row in own):
        by_budget = {row.budget: row.recovered[formats] for row in own if row.label == label and row.budget in budgets}
        if set(by_budget) == budgets:
            blocks = [b for b in next(iter(by_budget.values())) if all(b in values for values in by_budget.values())]
            means[label] = {b: float(np.mean([values[b] for values in by_budget.values()])) for b in blocks}
    mine = means.pop(REFERENCE)
    found = [_paired(label, None, mine, theirs) for label, theirs in means.items()]
    return _adjust([difference for difference in found if difference.blocks])


def planned_differences(table: Sequence[Row], planned: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Make the comparisons that an experiment announced. Their p-values are adjusted together, and with no others.

    Announced comparisons without enough runs count in the adjustment: which ones fail or are still missing must not
    make the others significant.

    Args:
        table: the rows of all policies.
        planned: the announced comparisons; see :class:`~snip_megatron.evaluation.planned.Planned`.
    """
    known = {(row.kind, row.label, row.budget): row.recovered for row in table}
    found = []
    for plan in planned:
        for budget, theirs in itertools.product(plan["budgets"], plan["theirs"]):
            a = known.get((plan["kind"], plan["ours"], budget))
            b = known.get((plan["kind"], theirs, budget), known.get((plan["kind"], theirs, None)))  # None: a fixed map
            if a is not None and b is not None:
                validation = plan["validation"]
                difference = _paired(theirs, budget, a[validation], b[validation])
                found.append(replace(difference, ours=plan["ours"], validation=validation))
    return _adjust([difference for difference in found if difference.blocks], planned_count(planned))


def planned_count(planned: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of comparisons that an experiment announced."""
    return sum(len(plan["budgets"]) * len(plan["theirs"]) for plan in planned)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted by Holm's step-down procedure (Holm 1979), in the order given."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def paired(values: Sequence[float]) -> tuple[float, float, float, float]:
    """Test at least two paired differences against zero by Student's t test.

    Returns:
        The mean, the ends of its 95 % confidence interval, and the two-sided p-value.
    """
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
    kind, label, budget = key
    gap: dict[str, dict[Block, float]] = {formats: {} for formats in VALIDATIONS}
    share: dict[str, dict[Block, float]] = {formats: {} for formats in VALIDATIONS}
    for entry in members:
        block = _block(entry)
        bf16, fp4 = losses.get((kind, block, "bf16")), losses.get((kind, block, "uniform-fp4"))
        if bf16 is None:
            continue
        for formats in VALIDATIONS:
            loss = float(entry["validation"][formats])
            gap[formats][block] = loss - float(bf16[formats])
            value = math.nan if fp4 is None else recovered(loss, float(bf16[formats]), float(fp4[formats]))
            if math.isfinite(value):
                share[formats][block] = value
    mean_share = float(np.mean([entry.get("average_share", entry["fp4_share"]) for entry in members]))
    costs = [s / e["step_seconds"] for e in members if e.get("step_seconds") for s in e.get("update_seconds", ())]
    update_steps = float(np.median(costs)) if costs else None
    return Row(kind, label, budget, str(members[0]["policy"]), mean_share, gap, share, update_steps)


def _paired(theirs: str, budget: float | None, a: Mapping[Block, float], b: Mapping[Block, float]) -> Difference:
    values = [a[block] - b[block] for block in a if block in b]
    if len(values) < 2:
        mean = values[0] if values else math.nan
        return Difference(REFERENCE, theirs, budget, len(values), mean, None, None, None)
    mean, low, high, p = paired(values)
    return Difference(REFERENCE, theirs, budget, len(values), mean, low, high, p)


def _adjust(found: Sequence[Difference], family: int = 0) -> list[Difference]:
    """Adjust by Holm's procedure. Of a larger ``family``, the p-values that are not known count as 1."""
    known = [d.p for d in found if d.p is not None]
    adjusted = iter(holm([*known, *[1.0] * (family - len(known))]))
    return [d if d.p is None else replace(d, adjusted=next(adjusted)) for d in found]

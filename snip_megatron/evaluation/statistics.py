"""Gap recovered, and policies against each other by paired differences (EVALUATION)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
ALPHA = 0.05
VALIDATIONS = ("map", "bf16")
REFERENCE = "snip"
STRONGEST_RULE = "backward-first"
OTHERS = f"mean of the other policies but {STRONGEST_RULE}"

Block = tuple[str | None, int]
"""What is equal within a pair: hash of the warm weights (None from scratch) and seed."""


@dataclass(frozen=True)
class Row:
    """One policy at one budget. ``gap`` and ``recovered``: by formats of validation, then by block.

    ``update_steps``: median cost of an update in training steps of the same run; None without updates.
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
    """``ours`` − ``theirs`` recovered, over the blocks that both have.

    ``low``, ``high``: 95 % interval of the mean by Student's t; ``p`` two-sided, ``adjusted`` by Holm over all
    differences of its table. None with fewer than two blocks. ``budget`` None: the mean over all budgets.
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

    @property
    def verdict(self) -> str:
        """``better`` or ``worse`` where the adjusted p stays under 5 %, else ``no difference shown``."""
        if self.adjusted is None or self.adjusted >= ALPHA:
            return "no difference shown"
        return "better" if self.mean > 0 else "worse"


def recovered(loss: float, bf16: float, fp4: float) -> float:
    """1 − (loss − bf16) / (fp4 − bf16): share of all-fp4's loss gap that a map avoids. NaN where there is no gap."""
    gap = fp4 - bf16
    return 1.0 - (loss - bf16) / gap if gap > 0.0 else math.nan


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (NaN for a single value)."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def rows(entries: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Runs of a result file as rows, in their order. Blocks without bf16 and uniform-fp4 have no gap: left out."""
    done = [entry for entry in entries if entry.get("status") == "done"]
    losses = {(e["kind"], _block(e), e["policy"]): e["validation"] for e in done if e["budget"] is None}
    groups: dict[tuple[str, str, float | None], list[Mapping[str, Any]]] = {}
    for entry in done:
        groups.setdefault((entry["kind"], entry["label"], entry["budget"]), []).append(entry)
    return [_row(key, members, losses) for key, members in groups.items()]


def differences(table: Sequence[Row], kind: str, formats: str) -> list[Difference]:
    """``snip`` against every other policy at the same budget, and against their mean; adjusted together."""
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
    """``snip`` against every other policy, each block's mean over the budgets; adjusted among themselves.

    One noise per block remains of several budgets', so small differences show sooner than at any one budget. Policies
    with other budgets than ``snip``, and blocks without all of them, are left out; empty for a single budget.
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


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values by Holm's step-down procedure (Holm 1979), in the order given."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def paired(values: Sequence[float]) -> tuple[float, float, float, float]:
    """(mean, low, high, p) of paired differences: Student's t, two-sided. Needs at least two values."""
    data = np.asarray(values, dtype=np.float64)
    mean, error = float(data.mean()), float(data.std(ddof=1)) / math.sqrt(len(data))
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(data) - 1)) * error
    if error == 0.0:
        return mean, mean, mean, 1.0 if mean == 0.0 else 0.0
    return mean, mean - half, mean + half, float(2.0 * stats.t.sf(abs(mean / error), len(data) - 1))


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
        if bf16 is None or fp4 is None:
            continue
        for formats in VALIDATIONS:
            loss = float(entry["validation"][formats])
            value = recovered(loss, float(bf16[formats]), float(fp4[formats]))
            gap[formats][block] = loss - float(bf16[formats])
            if math.isfinite(value):
                share[formats][block] = value
    mean_share = float(np.mean([entry["fp4_share"] for entry in members]))
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


def _adjust(found: Sequence[Difference]) -> list[Difference]:
    adjusted = iter(holm([d.p for d in found if d.p is not None]))
    return [d if d.p is None else replace(d, adjusted=next(adjusted)) for d in found]

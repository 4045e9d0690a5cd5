"""Gaps of trained losses to bf16 in mnat, with 95 % intervals, and whether they keep a bound.

    python -m benchmarks.quality.gaps RESULT.json … [--most 2]

A result is one of ``compare``. A gap is the loss of a run minus that of bf16 with the same warm checkpoint and
seed, both validated in the formats of their maps (*own*) or in bf16. Intervals are Student's t over the seeds. A bound
is *kept* if the whole interval lies below it, *missed* if the whole interval lies above it, otherwise *open*.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.quality.results import load_results
from benchmarks.quality.statistics import Row, paired, rows


@dataclass(frozen=True)
class Gap:
    """A mean gap and its interval in mnat, over so many runs. With one run the ends are infinite."""

    mean: float
    low: float
    high: float
    runs: int

    def verdict(self, most: float) -> str:
        """Return what is shown about a bound of ``most`` mnat."""
        return "kept" if self.high <= most else "missed" if self.low > most else "open"

    def __str__(self) -> str:
        interval = "" if math.isinf(self.low) else f" ({self.low:.2f} to {self.high:.2f})"
        return f"{self.mean:.2f}{interval}"


def gap(row: Row, validation: str = "map") -> Gap:
    """Return the gap of a policy. Raises ValueError if no run has one in bf16 beside it."""
    values = [1e3 * value for value in row.gap[validation].values()]
    if not values:
        raise ValueError(f"{row.label}: no run has a run in bf16 with the same checkpoint and seed")
    if len(values) == 1:
        return Gap(values[0], -math.inf, math.inf, 1)
    mean, low, high, _ = paired(values)
    return Gap(mean, low, high, len(values))


def policy_rows(path: Path, kind: str = "from_warm") -> list[Row]:
    """Return the policies of a result, with their gaps. Raises SnipError if the file is none."""
    return [row for row in rows(list(load_results(path).runs.values())) if row.kind == kind and row.gap["map"]]


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for each result."""
    parser = argparse.ArgumentParser(description="Gaps to bf16 in mnat, with 95 %% intervals")
    parser.add_argument("results", nargs="+", type=Path, help="result files of compare")
    parser.add_argument("--most", type=float, default=2.0, help="bound in mnat (default: 2)")
    arguments = parser.parse_args(argv)
    for path in arguments.results:
        print(f"{path.name}\n\n| policy | budget | gap, own | at most {arguments.most:g} | gap, bf16 | runs |")
        print("|---|---|---|---|---|---|")
        for row in policy_rows(path):
            gap_in_map, gap_in_bf16 = gap(row), gap(row, "bf16")
            budget = "–" if row.budget is None else f"{100 * row.budget:g} %"
            verdict = gap_in_map.verdict(arguments.most)
            print(f"| {row.label} | {budget} | {gap_in_map} | {verdict} | {gap_in_bf16} | {gap_in_map.runs} |")
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())

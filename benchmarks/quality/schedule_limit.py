"""What the best plan over time could recover, from the runs of a comparison of schedules.

    python -m benchmarks.quality.schedule_limit benchmarks/compare_26m-time_…json [more results] --out F.json

A model of the loss is fitted to the results, and the best FP4 share of each phase is searched under it. The loss of
all-fp4 has three parts, as shares of its gap to bf16 in its own formats:

- *standing*: gone as soon as the map is precise. It is what all-fp4 loses more in its own formats than in bf16.
- *fast*: decays with a time constant once the forward is precise.
- *carried*: what steps leave in the weights, in proportion to the learning rate.

The parts that bf16 sees are fitted to ``late-all`` and ``late-forward``. A map of a smaller share has all parts in
proportion to what ``snip, static`` loses at this share. The result says, for each budget, what ``snip, auto`` recovered
in training, what the model gives for its phases, and what for others. ``equal 40`` is close to the limit of any plan.
No GPU is needed.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.optimize import least_squares, minimize

from benchmarks.common import header, write
from benchmarks.quality.statistics import rows
from snip_megatron.precision.phases import AUTO

STARTS = 30
PHASES = {
    "auto": tuple(phase.begin for phase in AUTO.phases),
    "late end": (0.0, 0.5, 0.8, 0.95),
    "three, late end": (0.0, 0.9, 0.98),
    "equal 10": tuple(np.arange(10) / 10),
    "equal 40": tuple(np.arange(40) / 40),
}
Gaps = dict[tuple[str, float | None], dict[str, float]]


def mean_gaps(results: Sequence[dict[str, Any]]) -> Gaps:
    """Return (label, budget) → validation formats → mean gap of the branches to bf16 of the same seed, in nats."""
    runs = {run["id"]: run for result in results for run in result["runs"] if run["kind"] == "from_warm"}
    return {
        (row.label, row.budget): {formats: float(np.mean(list(gap.values()))) for formats, gap in row.gap.items()}
        for row in rows(list(runs.values()))
    }


def rate_weights(experiment: dict[str, Any]) -> np.ndarray:
    """Return the share of each step of a branch in its ∫ η dt: linear warm-up, then cosine to the minimum."""
    training, phase = experiment["training"], experiment["phases"][0]
    begin = experiment["warm"]["steps"]
    end, warmup = begin + phase["steps"], training["warmup_steps"]
    progress = (np.arange(begin, end) + 0.5 - warmup) / (end - warmup)
    eta = training["min_lr"] + 0.5 * (training["lr"] - training["min_lr"]) * (1.0 + np.cos(np.pi * progress))
    weights: np.ndarray = eta / eta.sum()
    return weights


@dataclass(frozen=True)
class Model:
    """The parts of all-fp4's gap, as shares of it; ``steps`` is the time constant of the fast part."""

    carried: float
    fast: float
    standing: float
    steps: float
    weights: np.ndarray
    residual: float

    def loss(self, begins: Sequence[float], lost: np.ndarray) -> float:
        """Return the share of the gap that a run loses. Each phase would lose its share of ``lost`` if it lasted for
        ever.
        """
        count = len(self.weights)
        edges = np.array([round(begin * count) for begin in begins] + [count])
        pairs = list(itertools.pairwise(edges))
        carried = np.array([self.weights[a:b].sum() for a, b in pairs])
        fading = np.exp(-(count - edges) / self.steps)
        fading[0] = 0.0  # the run before the first phase had the same formats
        return float(
            self.carried * (carried * lost).sum()
            + self.fast * (np.diff(fading) * lost).sum()
            + self.standing * lost[-1]
        )


def fit(gaps: Gaps, weights: np.ndarray) -> Model:
    """Fit the parts that bf16 sees to the late policies, and take the standing part from all-fp4."""
    whole = gaps["uniform-fp4", None]
    gemms = {"late-all": 3, "late-forward": 1}  # of three that the policy switches
    points = [(3, 0.0, whole["bf16"])]
    for (label, budget), gap in gaps.items():
        if label in gemms and budget is not None:
            points.append((gemms[label], (1.0 - budget) * 3 / gemms[label], gap["bf16"]))
    switched, precise, measured = np.array(points).T
    count = len(weights)
    steps = np.rint(precise * count).astype(int)
    remaining = np.array([weights[: count - n].sum() for n in steps])

    def predicted(x: np.ndarray) -> np.ndarray:
        forward, backward, fast, constant = x
        carried = forward * remaining + backward * np.where(switched == 3, remaining, 1.0)
        return np.asarray(carried + fast * np.exp(-steps / constant))

    scale = whole["map"]
    start = np.array([0.3, 0.05, 0.15, 30.0])
    bounds = ([0.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, float(count)])
    solution = least_squares(lambda x: predicted(x) - measured / scale, start, bounds=bounds)
    forward, backward, fast, constant = map(float, solution.x)
    carried = forward + backward
    residual = float(np.abs(solution.fun).max()) * scale
    return Model(carried, fast, 1.0 - whole["bf16"] / scale, constant, weights, residual)


def best(model: Model, curve: PchipInterpolator, begins: Sequence[float], target: float) -> tuple[float, list[float]]:
    """Return the largest share of the gap that a plan recovers, and its FP4 shares by phase.

    Args:
        model: the model of the loss.
        curve: FP4 share of a map → share of the gap that it loses.
        begins: beginnings of the phases, as shares of the run.
        target: the average FP4 share.
    """
    lengths = np.diff([*begins, 1.0])
    optimum: tuple[float, list[float]] = (-np.inf, [])
    for seed in range(STARTS):
        start = np.clip(target + np.random.default_rng(seed).normal(0.0, 0.15, len(lengths)), 0.0, 1.0)
        solution = minimize(
            lambda shares: model.loss(begins, curve(shares)),
            start,
            bounds=[(0.0, 1.0)] * len(lengths),
            constraints={"type": "ineq", "fun": lambda shares: lengths @ shares - target},
            method="SLSQP",
            options={"maxiter": 500},
        )
        if solution.success and 1.0 - solution.fun > optimum[0]:
            optimum = (1.0 - float(solution.fun), [round(float(share), 3) for share in solution.x])
    return optimum


def limits(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the fitted model, and measured and predicted shares of the gap recovered at every budget of ``auto``."""
    gaps = mean_gaps(results)
    whole = gaps["uniform-fp4", None]["map"]
    model = fit(gaps, rate_weights(results[0]["experiment"]))
    static = {budget: gap["map"] / whole for (label, budget), gap in gaps.items() if label == "snip, static" and budget}
    points = {0.0: gaps["uniform-fp8", None]["map"] / whole, **static, 1.0: 1.0}
    shares = sorted(points)
    curve = PchipInterpolator(shares, [points[share] for share in shares])
    parts = ("carried", "fast", "standing", "steps", "residual")
    table = []
    for budget in sorted(static):
        measured = 1.0 - gaps["snip, auto", budget]["map"] / whole
        predicted = {}
        for name, begins in PHASES.items():
            recovered, by_phase = best(model, curve, begins, budget)
            predicted[name] = {"recovered": recovered, "shares": by_phase}
        table.append({"budget": budget, "auto measured": measured, "predicted": predicted})
    return {"model": {name: getattr(model, name) for name in parts}, "phases": PHASES, "rows": table}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="What the best plan over time could recover")
    parser.add_argument("results", nargs="+", type=Path, help="result files of compare")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--commit", help="what is measured, where the tree has no .git")
    arguments = parser.parse_args()
    result = limits([json.loads(path.read_text(encoding="utf-8")) for path in arguments.results])
    write(arguments.out, header(arguments.commit) | result)
    print({name: round(value, 4) for name, value in result["model"].items()})
    for row in result["rows"]:
        predicted = ", ".join(f"{name} {each['recovered']:.3f}" for name, each in row["predicted"].items())
        print(f"{100 * row['budget']:g} %: auto {row['auto measured']:.3f} in training; predicted: {predicted}")


if __name__ == "__main__":
    main()

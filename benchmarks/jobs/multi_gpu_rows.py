"""The rows of :mod:`benchmarks.jobs.multi_gpu`: differences between a layout and one GPU, and the cost of an update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from snip_megatron.precision import Gemm
from snip_megatron.runtime.run_data import read_events, read_maps, read_metrics
from snip_megatron.sensitivity.table import RHO_GRID, StatisticsTable

# bf16's rounding unit is 2^-8 = 3.9e-3: what a reduction over ranks in another order may move.
LIMITS = {"statistics_median": 4e-3, "map_agreement": 0.9, "loss": 2e-2}


def compared(expected: Path, actual: Path, at: int) -> dict[str, Any]:
    """Compare a layout's run with that of one GPU. ``at`` is the step of the update."""
    row = statistics_apart(*(StatisticsTable.load(r / "stats" / f"step_{at}.npz") for r in (expected, actual)))
    row |= maps_apart(expected, actual, at) | losses_apart(expected, actual)
    within = (
        row["statistics_median"] <= LIMITS["statistics_median"]
        and row["map_agreement"] >= LIMITS["map_agreement"]
        and row["loss"] <= LIMITS["loss"]
        and row["same_tokens"]
    )
    return row | {"within_limits": bool(within)}


def statistics_apart(expected: StatisticsTable, actual: StatisticsTable) -> dict[str, Any]:
    """Return relative differences over all columns (drift from ρ = 1e-2 on).

    These are the median, the 95th percentile, and the worst one with its column.
    """
    parts: dict[str, np.ndarray] = {}
    for name, array in expected.arrays.items():
        other = actual.arrays[name]
        if name in ("drift2", "sink_drift2"):
            array, other = array[..., RHO_GRID >= 1e-2], other[..., RHO_GRID >= 1e-2]
        there = array != 0.0
        parts[name] = np.abs(other - array)[there] / np.abs(array[there])
    everything = np.concatenate([part.ravel() for part in parts.values()])
    worst = max((name for name in parts if parts[name].size), key=lambda name: float(parts[name].max()))
    return {
        "statistics_median": float(np.median(everything)),
        "statistics_p95": float(np.quantile(everything, 0.95)),
        "statistics_worst": float(parts[worst].max()),
        "worst_column": worst,
        "columns_median": {name: float(np.median(part)) for name, part in parts.items() if part.size},
        "same_tokens": (expected.tokens, expected.tokens_per_step) == (actual.tokens, actual.tokens_per_step),
    }


def maps_apart(expected: Path, actual: Path, at: int) -> dict[str, Any]:
    """Return the share of the GEMMs with the same format, and the fp4 share of each map."""
    (one,), (other,) = read_maps(expected).values(), read_maps(actual).values()
    names = [row.name for row in StatisticsTable.load(expected / "stats" / f"step_{at}.npz").linears]
    same = [one.format_of(name, gemm) is other.format_of(name, gemm) for name in names for gemm in Gemm]
    return {
        "map_agreement": sum(same) / len(same),
        "achieved": [one.achieved, other.achieved],
        "adopted": [[e["step"] for e in read_events(run) if e["event"] == "adopt"] for run in (expected, actual)],
    }


def losses_apart(expected: Path, actual: Path) -> dict[str, Any]:
    """Return the worst relative difference of a step's loss, and that after the last step."""
    one, other = ({m["step"]: m["loss"] for m in read_metrics(run)} for run in (expected, actual))
    apart = [abs(other[step] - loss) / loss for step, loss in one.items()]
    return {"loss": max(apart), "last_loss": apart[-1], "losses": [list(one.values()), list(other.values())]}


def update_cost(run: Path, step_ms: float) -> dict[str, Any]:
    """Return the passes and the blocked time of the run's last update, in milliseconds and in steps."""
    events = read_events(run)
    submit = [e for e in events if e["event"] == "submit"][-1]
    events = [e for e in events if e["step"] >= submit["step"]]
    passes = {e["kind"]: 1e3 * e["seconds"] for e in events if e["event"] in ("probe", "collect")}
    blocked = sum(e.get("wait_s") or 0.0 for e in events if e["event"] in ("submit", "adopt", "solved", "postpone"))
    return {
        "ms": 1e3 * submit["update_seconds"],
        "steps": 1e3 * submit["update_seconds"] / step_ms,
        "passes_ms": passes,
        "wait_besides_probes_ms": 1e3 * blocked,
        "fp4_fraction": [e["fp4_fraction"] for e in events if e["event"] == "adopt"],
    }

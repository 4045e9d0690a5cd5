"""Predicted against measured rises of the loss, for every map that a run measured.

    python -m benchmarks.quality.rises RUN … --out benchmarks/results/quality/F.json [--commit SHA]

A RUN is the directory of a training under ``--snip``. For each of its events ``rise`` the result has the candidates
with the predicted and the measured rise by their fprops in nats, which of them was the best, and what the forwards
cost. ``ratio`` is measured / predicted, and ``errors`` is (measured − predicted) in standard errors. ``update_s`` is
what all events of the update cost, ``rise_s`` the part of the forwards that measured. ``means`` are over all maps of a
policy: a single measurement contains an effect of first order, which has either sign and no mean.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import header, write
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.run_data import RunData, Update, load_run, number

FACTS = ("model", "device", "gemm_backend", "world_size", "tensor_parallel", "pipeline_parallel", "global_batch_size")
CONFIG = ("budget", "formats", "policy", "estimator", "schedule", "update_interval", "probe_microbatches")


def candidate(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of one candidate of an event."""
    predicted, rise = number(fields.get("predicted_rise")), number(fields.get("measured_rise"))
    figures = {
        "policy": fields.get("policy"),
        "predicted": predicted,
        "measured": rise,
        "error": (error := number(fields.get("measured_error"))),
        "predicted_backward": fields.get("predicted_backward"),
    }
    if rise is None or predicted is None:
        return figures
    ratio, errors = rise / predicted if predicted else None, (rise - predicted) / error if error else None
    return figures | {"ratio": ratio and round(ratio, 3), "errors": errors and round(errors, 2)}


def of_run(run: RunData) -> dict[str, Any]:
    """Return the measured maps of a run, in the order of their steps."""
    losses = {row["step"]: row.get("loss") for row in run.metrics}
    changed = {adoption.step: adoption.fields.get("changed") for adoption in run.adoptions}
    formats = {adoption.step: adoption.fields.get("formats") for adoption in run.adoptions}
    maps = []
    for event in run.events:
        if event["event"] != "rise":
            continue
        step = event["step"]
        maps.append(
            {
                "step": step,
                "version": event.get("version"),
                "best": candidate(event),
                "candidates": [candidate(each) for each in event.get("candidates", [])],
                "tokens": event.get("measured_tokens"),
                "bound": event.get("bound"),
                "rejected": any(e["event"] == "rejected" and e["step"] == step for e in run.events),
                "loss": losses.get(step),
                "changed": changed.get(step),
                "formats": formats.get(step),
                "rise_s": event.get("wait_s"),
            }
        )
    ratios = [ratio for each in maps if (ratio := each["best"].get("ratio")) is not None]
    updates = [of_update(run, update) for update in run.updates]
    costs = [cost for each in updates if (cost := each["with_over_without_rise"]) is not None]
    return {
        "run": run.path.name,
        **{name: run.facts.get(name) for name in FACTS},
        **{name: run.config.get(name) for name in CONFIG},
        "steps": len(run.metrics),
        "maps": maps,
        "updates": updates,
        "with_over_without_rise": round(statistics.median(costs), 3) if costs else None,
        "means": means([each for of_map in maps for each in of_map["candidates"]]),
        "median_ratio": round(statistics.median(ratios), 3) if ratios else None,
    }


def of_update(run: RunData, update: Update) -> dict[str, Any]:
    """Return what an update cost, and how many times as much as without its measured rise."""
    rises = [event for event in run.events if event["event"] == "rise" and event.get("version") == update.version]
    rise_s = math.fsum(number(event.get("wait_s")) or 0.0 for event in rises[:1])  # the others are of later phases
    without = (update.wait_s or 0.0) - math.fsum(number(event.get("wait_s")) or 0.0 for event in rises)
    return {
        "step": update.step,
        "update_s": update.wait_s,
        "rise_s": rise_s or None,
        "with_over_without_rise": round(1 + rise_s / without, 3) if rise_s and without > 0 else None,
        "status": update.status,
    }


def means(candidates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return by policy the means of predicted and measured rises. ``error`` is the standard error of the latter."""
    means = {}
    for policy in dict.fromkeys(str(each["policy"]) for each in candidates):
        pairs = [
            (each["predicted"], each["measured"])
            for each in candidates
            if each["policy"] == policy and each["predicted"] is not None and each["measured"] is not None
        ]
        if len(pairs) > 1:
            predicted, measured = zip(*pairs, strict=True)
            means[policy] = {
                "maps": len(pairs),
                "predicted": statistics.mean(predicted),
                "measured": statistics.mean(measured),
                "error": statistics.stdev(measured) / math.sqrt(len(pairs)),
            }
    return means


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each map, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    parser.add_argument("--out", type=Path, help="the result file")
    parser.add_argument("--commit", help="the measured commit, in a tree without .git")
    arguments = parser.parse_args(argv)
    try:
        runs = [of_run(load_run(path)) for path in arguments.runs]
    except SnipError as error:
        print(f"rises: {error}", file=sys.stderr)
        return error.exit_code
    for run in runs:
        for each in run["maps"]:
            print(json.dumps({"run": run["run"], "step": each["step"], **each["best"]}))
        print(json.dumps({name: run[name] for name in ("run", "means", "with_over_without_rise")}))
    write(arguments.out, {"benchmark": "rises", **header(arguments.commit), "runs": runs})
    return 0


if __name__ == "__main__":
    sys.exit(main())

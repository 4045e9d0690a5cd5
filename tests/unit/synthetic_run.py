"""Writes what a report reads of a run, through RunDirectory: 6 layers, 24 linears, 5 updates, 2 stages."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from snip_megatron.precision import DENSE_LAYER, Format, Gemm, LinearId, PrecisionMap, option_id
from snip_megatron.precision.phases import PrecisionPlan
from snip_megatron.runtime.run_directory import RunDirectory

Scores = dict[str, dict[str, dict[str, float]]]
"""Option → format → its scores."""
LAYERS, STEPS, FIRST, INTERVAL, LAG, UPDATES, TARGET = 6, 120, 10, 20, 5, 5, 0.75
PER_STAGE = {"0": TARGET, "1": TARGET}
LINEARS = tuple(str(LinearId("decoder", layer, kind)) for layer in range(LAYERS) for kind in DENSE_LAYER)
CONFIG: dict[str, Any] = {
    "budget": f"fp4={TARGET}", "policy": "snip", "granularity": "gemm", "estimator": "noise", "formats": ["fp8", "fp4"],
    "update_interval": INTERVAL, "first_update": FIRST, "lag": LAG, "pin": [], "seed": 1234,
}  # fmt: skip
FACTS: dict[str, Any] = {
    "layout": {"tensor": 1, "pipeline": 2, "data": 1}, "world_size": 2, "parameters": 3_100_000,
    "versions": {"megatron-core": "0.19.0", "torch": "2.11.0"},
}  # fmt: skip


def stage_of(linear: str) -> int:
    return 0 if LinearId.parse(linear).layer < LAYERS // 2 else 1


def scores_of(rng: np.random.Generator) -> Scores:
    """Forward errors cost most, fp4 costs more than fp8, the first and last layer more than the others."""
    scores: Scores = {}
    for linear in LINEARS:
        edge = 3.0 if LinearId.parse(linear).layer in (0, LAYERS - 1) else 1.0
        for gemm in Gemm:
            size = edge * float(rng.lognormal(0.0, 0.5))
            loss = size * (2e-3 if gemm is Gemm.FPROP else 0.0)
            weight = size * {Gemm.FPROP: 4e-3, Gemm.DGRAD: 1e-3, Gemm.WGRAD: 5e-4}[gemm]
            scores[option_id(linear, gemm)] = {
                name: {"delta_loss": loss / by, "delta_weight": weight / by, "q": (loss + weight) / by}
                for name, by in (("fp8", 50.0), ("fp4", 1.0))
            }
    return scores


def map_of(version: int, scores: Scores) -> PrecisionMap:
    """A map with fp4 where it costs least, in three quarters of each stage's GEMMs."""
    choices: dict[str, Format] = {}
    for stage in (0, 1):
        keys = [key for key in scores if stage_of(key.partition(":")[0]) == stage]
        keys.sort(key=lambda key: scores[key]["fp4"]["q"])
        cut = round(TARGET * len(keys))
        choices |= dict.fromkeys(keys[:cut], Format.FP4) | dict.fromkeys(keys[cut:], Format.FP8)
    objective = sum(scores[key][fmt.value]["q"] for key, fmt in choices.items())
    return PrecisionMap(
        choices={key: choices[key] for key in scores}, version=version, status="optimal", objective=objective,
        bound=objective, target=TARGET, achieved=TARGET, achieved_per_stage=PER_STAGE, solve_seconds=0.3,
    )  # fmt: skip


def write_run(
    path: Path,
    *,
    updates: int = UPDATES,
    steps: int = STEPS,
    faults: bool = True,
    first: int = FIRST,
    seconds: tuple[float, float] | None = None,
    facts: Mapping[str, Any] = {},
    config: Mapping[str, Any] = {},
) -> Path:
    """A whole run; ``updates=0`` is a bf16 run.

    ``seconds`` are those of a step in bf16 and under a map, which the metrics then have; ``facts`` and ``config`` are
    added to FACTS and CONFIG.
    """
    rng = np.random.default_rng(7)
    config = CONFIG | ({} if updates else {"policy": "bf16"}) | dict(config)
    submitted = {first + i * INTERVAL: i + 1 for i in range(updates)}
    waiting: dict[int, PrecisionMap] = {}
    current: PrecisionMap | None = None
    with RunDirectory(path, config, overwrite=False, resume_step=None, facts=FACTS | dict(facts)) as run:
        for step in range(steps):
            if step in submitted:
                waiting[step + LAG] = submit(run, step, submitted[step], rng)
            if step in waiting:
                current = adopt(run, step, waiting[step], current)
            if faults and step == 57:
                run.event(step, "guard", reason="loss spike", loss=6.1, limit=5.0, wait_s=0.0)
            if faults and step == 72:
                run.event(step, "sidecar_restart", reason="no answer for 600 s", wait_s=0.0)
            if step % 40 == 39:
                run.event(step, "validation", loss=3.1 + 6.0 * math.exp(-step / 25), wait_s=1.5)
            run.step_s = 0.4 + 0.02 * float(rng.random())
            loss = 3.0 + 6.0 * math.exp(-step / 25) + 0.08 * float(rng.normal())
            timed = {} if seconds is None else {"step_s": seconds[0 if current is None else 1]}
            if timed and step % 10 == 9:
                timed["peak_bytes"] = (1 + (step > first)) * 2**30
            share = TARGET if current else 0.0
            run.metric(step, loss=loss, grad_norm=1.0 + float(rng.random()), fp4_fraction=share, **timed)
    return path


def submit(run: RunDirectory, step: int, version: int, rng: np.random.Generator) -> PrecisionMap:
    scores = scores_of(rng)
    precision_map = map_of(version, scores)
    for kind, seconds in (("statistics", 0.9), ("forward_noise", 0.7)):
        run.event(step, "probe", kind=kind, seconds=seconds + 0.1 * float(rng.random()), tokens=512, wait_s=seconds)
    run.event(step, "collect", seconds=0.12, wait_s=0.12)
    run.event(step, "submit", version=version, table_bytes=40_000, wait_s=0.002)
    run.write_scores(step, scores, version=version)
    run.event(
        step + 2, "solved", version=version, status="optimal", objective=precision_map.objective,
        bound=precision_map.bound, achieved=TARGET, achieved_per_stage=PER_STAGE,
        solve_seconds=0.3 + 0.1 * float(rng.random()), latency_s=0.8, wait_s=0.0,
    )  # fmt: skip
    return precision_map


def adopt(run: RunDirectory, step: int, new: PrecisionMap, old: PrecisionMap | None) -> PrecisionMap:
    changed = sum(old is None or old.choices[key] != fmt for key, fmt in new.choices.items())
    run.write("maps", step, new.to_json())
    run.event(
        step, "adopt", version=new.version, status=new.status, achieved=new.achieved,
        achieved_per_stage=new.achieved_per_stage, fp4_fraction=new.achieved, changed=changed, wait_s=0.004,
        formats={"fp4": TARGET, "fp8": 1 - TARGET},
    )  # fmt: skip
    return new


def add_plan(path: Path, plan: PrecisionPlan, shares: Sequence[float] = ()) -> None:
    """Add a plan to a run directory, as taken before its first step. ``shares`` are the fp4 shares of its phases."""
    step = plan.phases[0].begin
    (path / "plans").mkdir(exist_ok=True)
    (path / "plans" / f"step_{step}.json").write_text(plan.to_json())
    phases = [
        {"from_step": phase.begin, "steps": steps, "fp4_fraction": share}
        for phase, steps, share in zip(plan.phases, plan.steps, shares or [None] * len(plan.steps), strict=True)
    ]
    add_event(path, step, "plan", version=plan.version, status=plan.status, phase=0, phases=phases)


def add_event(path: Path, step: int, event: str, **fields: Any) -> None:
    """Append an event to a run directory."""
    with (path / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": 0.0, "step": step, "event": event, **fields}) + "\n")


def rewrite(path: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the lines of a record."""
    rows = [json.loads(line) for line in (path / name).read_text().splitlines()]
    for row in rows:
        change(row)
    (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

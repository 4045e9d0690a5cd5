"""Scenarios on gloo ranks, named by the arguments: each writes ``rank<k>.json`` to the folder ``OUT``."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dense_names import dense_names

from snip_megatron.precision import Format, Gemm, PrecisionMap, option_id
from snip_megatron.precision.phases import PlanPhase, PrecisionPlan
from snip_megatron.runtime.exchange import MapChannel, MapMismatchError, StepFigures, StepReport
from snip_megatron.runtime.solving import Candidate

NAMES = dense_names(3)
CPU = torch.device("cpu")


def a_map() -> PrecisionMap:
    """Three formats in a pattern, and every field set."""
    formats = (Format.FP4, Format.FP8, Format.BF16)
    choices = {option_id(n, g): formats[(i + j) % 3] for i, n in enumerate(NAMES) for j, g in enumerate(Gemm)}
    return PrecisionMap(
        choices, version=7, status="optimal", objective=1.5e-3, bound=1.25e-3, target=0.75, achieved=0.7512,
        achieved_per_stage={"0": 0.75, "1": 0.7524}, solve_seconds=0.25,
    )  # fmt: skip


class FaultyChannel(MapChannel):
    """Flips a bit of what this rank receives in its first ``faults`` broadcasts: fault injection."""

    def __init__(self, faults: int) -> None:
        super().__init__(NAMES, CPU)
        self.faults = faults
        self.broadcasts = 0

    def _broadcast(self, message: bytes) -> bytes:
        arrived = bytearray(super()._broadcast(message))
        self.broadcasts += 1
        if self.broadcasts <= self.faults:
            arrived[5] ^= 1
        return bytes(arrived)


def only_on_zero(value: Any) -> Any:
    return value if dist.get_rank() == 0 else None


def plan(faults: int = 0, rank: int = 1) -> dict[str, Any]:
    """A candidate with its map and plan, of which a rank receives some broadcasts damaged."""
    channel = FaultyChannel(faults if dist.get_rank() == rank else 0)
    candidates = (Candidate(a_map(), "snip", 0.5, plan=a_plan()),)
    try:
        (candidate,) = channel.agree(only_on_zero(candidates))
    except MapMismatchError as error:
        return {"error": str(error), "exit_code": error.exit_code, "broadcasts": channel.broadcasts}
    received = {"map": json.loads(candidate.precision_map.to_json()), "digest": candidate.precision_map.digest(NAMES)}
    return received | {"plan": candidate.plan and candidate.plan.as_dict(), "broadcasts": channel.broadcasts}


def other_model() -> dict[str, Any]:
    """A rank that built another model agrees about nothing."""
    names = dense_names(3) if dist.get_rank() != 2 else [*NAMES[1:], NAMES[0]]
    try:
        MapChannel(names, CPU).agree(only_on_zero(None))
    except MapMismatchError as error:
        return {"error": str(error)}
    return {}


def a_plan() -> PrecisionPlan:
    other = PrecisionMap.uniform(NAMES, Format.FP8, version=7, loss=0.25)
    return PrecisionPlan((PlanPhase(4, a_map()), PlanPhase(9, other)), 20, 7, "optimal", 0.5, 0.25, 0.75, 0.76)


def other_answers() -> dict[str, Any]:
    """Rank 0 sends a replay's schedule, then no candidates, then a late answer."""
    channel = MapChannel(NAMES, CPU)
    return {"values": [channel.agree(only_on_zero(value)) for value in ([3, 50, 2**40], [], None)]}


def report() -> dict[str, Any]:
    """Only the last rank sees a loss, as the last pipeline stage does. In one step no rank sees one."""
    figures = StepReport(CPU)
    last = dist.get_rank() == dist.get_world_size() - 1
    calls: list[StepFigures | None] = []
    for step, loss in enumerate((2.5, 2.25, None, 2.0)):
        value = torch.tensor([loss]) if last and loss is not None else None
        calls.append(figures.exchange(step, value, float("nan") if step == 1 else 1.0 + step))
    calls += [figures.drain(), figures.drain()]
    return {"figures": [None if f is None else [f.step, f.loss, f.grad_norm] for f in calls]}


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "plan": plan,
    "corrupted_twice": lambda: plan(2),
    "corrupted_always": lambda: plan(3),
    "other_model": other_model,
    "others": other_answers,
    "report": report,
}


def main() -> None:
    dist.init_process_group("gloo")
    result = {name: SCENARIOS[name]() for name in sys.argv[1:]}
    (Path(os.environ["OUT"]) / f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()

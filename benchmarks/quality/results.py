"""The result file of an experiment. It is complete after every run, and another machine can continue from it."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import result_text
from benchmarks.quality.runs import Run
from snip_megatron.precision.errors import SnipError, cut, quoted
from snip_megatron.runtime.run_data import read_events, read_metrics
from snip_megatron.runtime.storage import deliver

SCHEMA = "snip.comparison/1"
LAST_STEPS = 50
"""Number of last steps over which the reported training loss is the mean."""
MOST_RISE = 1.25
"""The most that this mean of a bf16 branch may be over the loss of the branch's first step."""


@dataclass
class Results:
    """The results of an experiment so far: name and content of its file, hash and number of the tokens (``data``), hash
    of the warm weights → facts about their training, and the entry of each run by its identity (:func:`record`).
    """

    path: Path
    experiment: Mapping[str, Any]
    data: Mapping[str, Any]
    warm: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def save(self) -> None:
        """Write the file under a temporary name and rename it. Raises SnipError if this fails."""
        body = {
            "schema": SCHEMA,
            "experiment": self.experiment,
            "data": self.data,
            "warm": self.warm,
            "runs": list(self.runs.values()),
        }
        deliver("--out", self.path, result_text(body))

    def is_done(self, identity: str) -> bool:
        return self.runs.get(identity, {}).get("status") == "done"


def load_results(path: Path) -> Results:
    """Read a result file. Raises SnipError if it cannot be read or is not one."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if body["schema"] != SCHEMA:
            raise ValueError(f"schema {quoted(body['schema'])} is not {SCHEMA}")
        runs = {str(run["id"]): dict(run) for run in body["runs"]}
        return Results(path, dict(body["experiment"]), dict(body["data"]), dict(body["warm"]), runs)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise SnipError(f"{path}: is no result file of compare ({cut(error)})") from None


def measure(run: Run, directory: Path) -> dict[str, Any]:
    """Read a finished run's figures from its run directory.

    Among others: ``validation`` (mean token loss in nats after the last step by formats, ``map`` and ``bf16``),
    ``train_loss`` (mean over the last steps), ``fp4_share`` (of the decoder linears' FLOPs after the last step),
    ``average_share`` (its mean over the steps). Raises ValueError if a figure is missing, or a bf16 branch does not
    continue the warm checkpoint.
    """
    events, metrics = read_events(directory), read_metrics(directory)
    if not metrics:
        raise ValueError("the run directory holds no metrics")
    last = int(metrics[-1]["step"])
    validation: dict[str, float] = {}
    for event in events:
        if event["event"] == "validation" and event["step"] == last + 1:
            loss = math.nan if event["loss"] is None else float(event["loss"])
            validation.setdefault(str(event["formats"]), loss)
    if set(validation) != {"map", "bf16"} or not all(math.isfinite(loss) for loss in validation.values()):
        raise ValueError(f"no validation in map and bf16 after step {last}, but {validation}")
    adopted = [event for event in events if event["event"] == "adopt"]
    if run.budget is not None and not adopted:
        raise ValueError(f"no map was adopted: {_reason(events)}")
    losses = [m["loss"] for m in metrics if m["loss"] is not None]
    tail = losses[-LAST_STEPS:]
    train_loss = sum(tail) / len(tail) if tail else None
    if train_loss is not None and run.kind == "from_warm" and run.policy == "bf16":
        _check_it_continues(losses[0], train_loss)
    return {
        "validation": validation,
        "train_loss": train_loss,
        "last_step": last,
        "fp4_share": metrics[-1]["fp4_fraction"],
        "average_share": sum(m["fp4_fraction"] for m in metrics) / len(metrics),
        "adopted": [{key: event.get(key) for key in ("step", "status", "changed")} for event in adopted],
    }


def record(run: Run, identity: str, **fields: Any) -> dict[str, Any]:
    """Return the entry of a run in the result file, with further ``fields``."""
    named = ("kind", "label", "policy", "granularity", "budget", "seed", "steps", "arguments")
    return {"id": identity} | {name: getattr(run, name) for name in named} | fields


def _check_it_continues(first: float, last: float) -> None:
    """Raise ValueError if a bf16 branch ends far above the loss of its first step.

    Every gap is measured from this run. The weights of the checkpoint, or the state of the optimizer, were not what the
    warm run had; a branch in four bits may diverge, but bf16 at a falling learning rate does not.
    """
    if not last <= MOST_RISE * first:
        raise ValueError(
            f"the training loss rose from {first:.4g} in the first step to {last:.4g}: the branch does not continue the"
            " warm checkpoint"
        )


def _reason(events: list[dict[str, Any]]) -> str:
    failures = [e for e in events if e["event"] in ("solve_failed", "dropped", "postpone", "skipped")]
    if not failures:
        return "no update was made"
    last = failures[-1]
    return f"{last['event']}: {last.get('message') or last.get('reason') or 'the solver was too late'}"

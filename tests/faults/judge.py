"""Whether a training lost anything: its steps against its own replay, its record, its processes."""

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faults.injection import read_record
from faults.kind import Lost
from snip_megatron.runtime.run_data import read_events, read_metrics

MARK = "FAULTS_JOB"
_GRACE_S = 10.0  # a sidecar looks for its parent every second

Curve = dict[int, tuple[str | None, str, str]]
"""Step → (loss, gradient norm, map), to the bit."""


def curve(folder: Path) -> Curve:
    """What the ranks traced, over all attempts in ``folder``. Raises Lost where a step was not the same twice."""
    found: dict[int, tuple[set[str], set[str]]] = {}
    for line in read_record(folder, "trace"):
        losses, others = found.setdefault(line["step"], (set(), set()))
        if line["loss"] is not None:
            losses.add(line["loss"])
        others.add(f"{line['norm']}/{line['map']}")
    for step, (losses, others) in found.items():
        if len(losses) > 1 or len(others) > 1:
            raise Lost(f"step {step} was not the same on all ranks or when it was done again")
    return {
        step: (next(iter(losses), None), *next(iter(others)).split("/", 1)) for step, (losses, others) in found.items()
    }


def same(one: Curve, other: Curve, what: str) -> int:
    """Compare the steps that both have, bit for bit; how many these are. Raises Lost."""
    shared = sorted(one.keys() & other.keys())
    for step in shared:
        if one[step] != other[step]:
            raise Lost(f"{what}: step {step} differs: {one[step][:2]} and {other[step][:2]}")
    return len(shared)


def complete(found: Curve, steps: int) -> None:
    """Every step was done, with a loss. Raises Lost."""
    missing = [step for step in range(steps) if step not in found or found[step][0] is None]
    if missing or len(found) != steps:
        raise Lost(f"steps missing: {missing[:5]}")


def merge_runs(parts: Sequence[Path], whole: Path) -> Path:
    """One run directory of what was recorded before and after a directory was removed or renamed."""
    for folder in ("maps", "stats", "problems", "scores"):
        (whole / folder).mkdir(parents=True, exist_ok=True)
        for part in parts:
            for file in (part / folder).glob("step_*"):
                shutil.copy(file, whole / folder / file.name)
    for name in ("events.jsonl", "metrics.jsonl"):
        texts = [(part / name).read_text() for part in parts if (part / name).exists()]
        (whole / name).write_text("".join(text if text.endswith("\n") or not text else text + "\n" for text in texts))
    for part in parts:
        if (part / "config.json").exists():
            shutil.copy(part / "config.json", whole / "config.json")
    return whole


def nothing_unrecorded(run: Path, steps: int) -> None:
    """Metrics of every step once, statistics of every submitted update, a map of every adoption. Raises Lost."""
    recorded = sorted(
        json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines() if line.strip()
    )
    if recorded != list(range(steps)) or len(read_metrics(run)) != steps:
        raise Lost(f"metrics.jsonl holds {len(recorded)} records of {steps} steps")
    for event in read_events(run):
        for kind, file in (("submit", "stats/step_{}.npz"), ("adopt", "maps/step_{}.json")):
            path = run / file.format(event["step"])
            if event["event"] == kind and not path.exists():
                raise Lost(f"{path.name} of a recorded {kind} is missing")


def orphans(mark: str) -> list[str]:
    """Command lines of processes that a job left behind, after a moment's grace.

    Not counted, but ended: wandb's service, and the queue server that Megatron's checkpoint writer starts by
    ``multiprocessing``, which a SIGKILL of its rank orphans with SNIP or without.
    """
    end = time.monotonic() + _GRACE_S
    while (left := _commands(mark)) and any(not _of_others(line) for line in left.values()):
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [line for line in left.values() if not _of_others(line)]


def _of_others(line: str) -> bool:
    return "wandb" in line or "from multiprocessing" in line


def marked_pids(mark: str) -> list[int]:
    """Processes whose environment holds ``mark``, a variable and its value."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def _commands(mark: str) -> dict[int, str]:
    lines = {}
    for pid in marked_pids(mark):
        try:
            lines[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return {pid: line for pid, line in lines.items() if line}


def events_in(run: Path, steps: range) -> list[dict[str, Any]]:
    """The events of some steps, in order."""
    return [event for event in read_events(run) if event["step"] in steps]

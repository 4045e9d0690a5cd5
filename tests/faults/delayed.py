"""What an update costs the training thread while the solver takes its time: Σ ``wait_s`` against a step's time."""

import itertools
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch import tiny_llama_args
from warm_ranks import WarmRanks

from faults.injection import read_record, write_json
from faults.jobs import MODULE, TIMEOUT_S, no_orphans
from faults.judge import MARK
from faults.kind import Lost
from faults.plan import Fault
from snip_megatron.runtime.run_data import read_events, read_metrics

UPDATE, LAG = 4, 5
_WAITS = ("submit", "postpone", "adopt", "collect")


def run_delayed(warm: WarmRanks, folder: Path, delay_s: float, step_s: float = 0.0) -> dict[str, Any]:
    """Train on two ranks until the map arrives ``delay_s`` seconds after it was asked for; what that cost.

    ``step_s`` makes a step longer by a sleep. Returns seconds: the median step's, those that the training thread was
    blocked for the update (its probes excluded), and how many steps were trained meanwhile. Raises Lost.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fault = Fault(0, "solver delayed", UPDATE, {"build_s": delay_s, "step_s": step_s})
    write_json(folder / "plan.json", [asdict(fault)])
    snip = f"--snip --snip-first-update {UPDATE} --snip-update-interval 100000 --snip-lag {LAG} --snip-guard-steps 0"
    model = "--num-layers 2 --global-batch-size 4 --tensor-model-parallel-size 2 --exit-signal-handler"
    run = folder / "run"
    arguments = tiny_llama_args(*model.split(), *snip.split(), "--snip-dir", str(run), iters=20000)
    env = {"FAULTS": str(folder), MARK: str(folder)}
    done = warm.run(2, arguments, module=MODULE, env=env, tmp=folder / "ranks", timeout=TIMEOUT_S)
    no_orphans(folder)
    if done.returncode:
        raise Lost(f"the delayed run ended with exit code {done.returncode}: {done.stderr[-200:]}")
    if not read_record(folder, "notes_builder"):
        raise Lost("the solver was not delayed")
    events = [event for event in read_events(run) if event["step"] >= UPDATE]
    adopted = next((event["step"] for event in events if event["event"] == "adopt"), None)
    if adopted is None:
        raise Lost(f"no map was adopted: {[event['event'] for event in events]}")
    times = [metric["time"] for metric in read_metrics(run) if UPDATE < metric["step"] < adopted]
    waits = {kind: sum(e["wait_s"] or 0.0 for e in events if e["event"] == kind) for kind in _WAITS}
    return {
        "delay_s": delay_s,
        "steps_meanwhile": adopted - UPDATE,
        "postponed": sum(event["event"] == "postpone" for event in events),
        "step_s": round(statistics.median(b - a for a, b in itertools.pairwise(times)), 4),
        "wait_s": round(sum(waits.values()), 4),
        "waits": {kind: round(seconds, 4) for kind, seconds in waits.items()},
    }

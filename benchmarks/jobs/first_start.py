"""Seconds from the command to the first step and to the first map, on a machine where nothing is compiled.

    python -m benchmarks.jobs.first_start --model 1b --out results/jobs/F.json [--commit SHA] [-- --cuda-graph-impl …]

Real runs of ``snip_megatron.pretrain_gpt`` on mock data follow one another: in Megatron's bf16, in its tensorwise FP8,
with ``--snip``, and with it again. All but the last begin with empty caches of kernels and of times. Arguments after
``--`` are passed to every run. ``first_step_s`` is the time to the end of the first step, ``first_map_s`` to the first
adoption, and ``events`` has the events that say what was waited for.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, header, write
from benchmarks.jobs.contenders import MODELS
from benchmarks.jobs.multi_gpu_runs import LLAMA
from snip_megatron.runtime.run_data import read_events

UPDATES = ["--snip-first-update", "20", "--snip-update-interval", "60", "--snip-lag", "10"]
FP8 = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"]
TOLD = ("compile", "postpone", "dropped", "probe", "collect", "adopt", "recapture")


def started(name: str, contender: Sequence[str], steps: int, caches: Path) -> dict[str, Any]:
    """Run one training. Returns its seconds and events."""
    folder = Path(tempfile.mkdtemp(dir=caches))
    run = ["--snip-dir", str(folder / "run"), "--snip-overwrite"] if "--snip" in contender else []
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m"]
    command += ["snip_megatron.pretrain_gpt", *LLAMA, "--train-iters", str(steps), *contender, *run]
    variables = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "XDG_CACHE_HOME": "cache"}
    variables["DG_JIT_CACHE_DIR"] = "deepgemm"
    environment = os.environ | {variable: str(caches / place) for variable, place in variables.items()}
    begun, log = time.time(), folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
        first = None
        while process.poll() is None:
            time.sleep(0.1)
            if first is None and " iteration        1/" in log.read_text(errors="replace"):
                first = time.time() - begun
    if process.returncode or first is None:
        sys.exit(f"first_start: the training {name!r} failed:\n{log.read_text()[-3000:]}")
    events = [event for event in read_events(folder / "run") if event["event"] in TOLD] if run else []
    maps = [event["time"] - begun for event in events if event["event"] == "adopt"]
    print(f"{name:>16}: first step {first:6.1f} s, first map {maps[0] if maps else float('nan'):6.1f} s", flush=True)
    lines = [line for line in log.read_text().splitlines() if line.startswith("snip:")]
    return {"first_step_s": first, "first_map_s": maps[0] if maps else None, "events": events, "lines": lines}


def main() -> int:
    """Run the benchmark. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="1b")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run with updates")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--commit", help="what is measured, where the tree has no .git")
    parser.add_argument("megatron", nargs="*", help="arguments for Megatron, after --")
    arguments = parser.parse_args()
    base, runs = [*MODELS[arguments.model].arguments, *arguments.megatron], {}
    snip = ["--snip", *UPDATES]
    with tempfile.TemporaryDirectory() as folder:
        for name, caches, more, steps in (
            ("bf16", "bf16", [], 2),
            ("fp8", "fp8", FP8, 2),
            ("snip", "snip", snip, arguments.steps),
            ("snip again", "snip", snip, arguments.steps),
        ):
            place = Path(folder) / caches
            place.mkdir(exist_ok=True)
            runs[name] = started(name, [*base, *more], steps, place)
    write(arguments.out, header(arguments.commit) | {"model": arguments.model, "runs": runs})
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A long training with an update every 20 steps and a fault every 50, and its undisturbed replay.

python -m benchmarks.reliability.soak --steps N --out F.json                  # TP2 × PP2 × DP2 on eight CPU ranks
python -m benchmarks.reliability.soak --steps N --device cuda --layout tp2 --out F.json

Ranks are forked from a process that has imported what they need; on GPUs each takes the next visible one. Faults come
from the table of the tests (tests/faults/table.py), drawn by a seed. Every loss, gradient norm and map must be that of
the replay, bit for bit, and what each process holds must be flat after the first tenth: see :func:`flatness`. A soak
that is stopped by ``--timeout`` or a signal judges and writes what it has. The exit code is 0 if nothing was lost, grew
or was left out. Otherwise what the ranks said stands beside the result file, in ``F.log``.
"""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/gpu")]

from faults.job import NOT_REACHED, Job, LostError, curve_of, end_processes, lines_of  # noqa: E402  adds tests/distributed
from faults.table import Case, all_cases, ends_process  # noqa: E402
from forked_ranks import run_ranks  # noqa: E402

from benchmarks.common import header, write  # noqa: E402
from snip_megatron.runtime.run_data import read_events  # noqa: E402

UPDATES, LAG, FAULT_EVERY = 20, 10, 50
"""Steps between updates, from an update to its map, and between faults."""
SNIP = ("--snip-budget", "fp4=0.75", "--snip-formats", "fp8,fp4")
LAYOUTS = {
    "tp2-pp2-dp2": (8, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"),
    "tp2-pp2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"),
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "dp2": (2, "--use-distributed-optimizer"),
}
ON_GPUS = (
    "--bf16 --hidden-size 512 --ffn-hidden-size 1024 --num-attention-heads 8 --num-query-groups 4 --seq-length 256"
    " --max-position-embeddings 256 --disable-jit-fuser"
)
_DELAY_S = 3.0
MEMORY_SHARE = 0.02
"""Share by which memory may grow."""
TRAINING_SHARE = 0.6
"""Share of the time for training and replay that the training may take."""
Body = dict[str, Any]


class GpuRanks:
    """Runs jobs as ``warm_ranks.WarmRanks`` does, each rank on a GPU of its own."""

    def run(
        self,
        ranks: int,
        args: Sequence[str],
        *,
        module: str,
        env: Mapping[str, str],
        tmp: Path,
        timeout: float,
        grace: float,
    ) -> subprocess.CompletedProcess[str]:
        tmp.mkdir(parents=True)
        outputs = [(tmp / f"rank{rank}.out", tmp / f"rank{rank}.err") for rank in range(ranks)]
        codes = run_ranks(ranks, module, args, folder=tmp, outputs=outputs, environment=env, timeout=timeout)
        out, err = ("".join(pair[kind].read_text(errors="replace") for pair in outputs) for kind in (0, 1))
        return subprocess.CompletedProcess(list(args), next(filter(None, codes), 0), out, err)

    def close(self) -> None:
        """Do nothing."""


def warm_ranks() -> Any:
    from warm_ranks import WarmRanks  # needs plotly, which a machine with GPUs may lack

    return WarmRanks()


def draw_faults(steps: int, seed: int) -> dict[int, Case]:
    """Return step → fault, one in every 50 steps, none in the first and the last of them. None ends the job."""
    drawn, cases = random.Random(seed), [case for case in all_cases() if not ends_process(case)]
    return {begin: drawn.choice(cases) for begin in range(FAULT_EVERY, steps - FAULT_EVERY, FAULT_EVERY)}


def soak(
    ranks: Any,
    folder: Path,
    layout: str,
    steps: int,
    faults: Mapping[int, Case],
    extra: Sequence[str] = (),
    timeout: float = 3600.0,
) -> Body:
    """Train with faults from the update at or after a step, and replay without.

    Returns what came of it, also if the time is over or a KeyboardInterrupt comes. ``lost`` says what a fault has cost.
    One whose update was skipped, because the map before it was late, costs nothing.
    """
    count, cases = LAYOUTS[layout][0], list(faults.values())
    shares = (timeout * TRAINING_SHARE, timeout * (1.0 - TRAINING_SHARE))
    started, at = time.perf_counter(), folder / "job"
    job = Job(
        ranks, at, LAYOUTS[layout], cases, _DELAY_S, first=UPDATES, interval=UPDATES, lag=LAG, due=list(faults),
        steps=steps, extra=[*SNIP, *extra], sample_every=max(1, steps // 200), shares=shares,
    )  # fmt: skip
    stopped, lost = None, []
    try:
        job.run()
    except LostError as error:
        lost = [str(error)]
    except KeyboardInterrupt:
        stopped = "by a signal"
        for start in at.glob("*/"):
            end_processes(start, 0.0)
    lost += [f"{cases[index]}: {why}" for index, why in job.lost.items() if why != NOT_REACHED]
    trained = len(curve_of(at, "start0")) // count
    if not lost and stopped is None and job.compared < steps:
        stopped = "by its time"
    kinds = [event["event"] for event in read_events(at / "run")] if (at / "run/events.jsonl").exists() else []
    counts = {kind: kinds.count(kind) for kind in ("submit", "adopt", "solve_failed", "dropped", "sidecar_restart")}
    return {
        "layout": layout,
        "ranks": count,
        "steps": steps,
        "trained": trained,
        "compared": job.compared,
        "stopped": stopped,
        "lost": lost or None,
        "seconds": round(time.perf_counter() - started, 1),
        "events": counts,
        "faults": [
            {"from_step": step, **case._asdict(), "outcome": job.outcomes.get(index, NOT_REACHED)}
            for index, (step, case) in enumerate(faults.items())
        ],
        "resources": [flatness(lines_of(at, f"resources{rank}")) for rank in range(count)],
    }


def flatness(samples: Sequence[Mapping[str, int]]) -> Body:
    """Judge what one process held at the samples of a training. The first tenth is left out.

    Each figure is [median of the second tenth, median of the last tenth]. Descriptors and threads are flat if they grow
    by one at most; resident memory, and bytes of the device that tensors take (``allocated``) and that torch holds
    (``device``), by :data:`MEMORY_SHARE`. The run directory grows by
    the records of steps and updates, so that its bytes a step must stay the same: those of the last third are at most
    1.25 times those of the second one. Bytes that a fault has removed stay counted.
    """
    if len(samples) < 20:
        return {"samples": len(samples), "growing": []}
    tenth = len(samples) // 10
    first, last = samples[tenth : 2 * tenth], samples[-tenth:]
    body: Body = {}
    growing = []
    for name in ("descriptors", "threads", "resident", "allocated", "device"):
        medians = [statistics.median(sample[name] for sample in part) for part in (first, last)]
        body[name] = [int(end) for end in medians]
        if medians[1] - medians[0] > (1.0 if name in ("descriptors", "threads") else MEMORY_SHARE * medians[0]):
            growing.append(name)
    if samples[-1]["files"] and samples[-1]["step"] >= 3 * UPDATES:
        last = samples[-1]["step"] // UPDATES * UPDATES  # whole intervals of updates, which write most
        third, rates = last // 3 // UPDATES * UPDATES, []
        for begin in (last - 2 * third, last - third):
            part = [sample for sample in samples if begin <= sample["step"] <= begin + third]
            grown = sum(max(0, b["written"] - a["written"]) for a, b in itertools.pairwise(part))
            rates.append(grown / (part[-1]["step"] - part[0]["step"]))
        body["written_a_step"], body["files"] = [round(rate, 1) for rate in rates], samples[-1]["files"]
        if rates[1] > 1.25 * rates[0]:
            growing.append("written")
    return body | {"growing": growing}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability.soak", description=__doc__)
    parser.add_argument("--steps", type=int, required=True, metavar="N", help="training steps; at least 150")
    parser.add_argument("--layout", choices=LAYOUTS, help="default: tp2-pp2-dp2 on the CPU, tp2 on GPUs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--arguments", default="", help="further arguments of the training")
    parser.add_argument(
        "--timeout", type=float, default=7200.0, metavar="S", help="of training and replay together; 0.6 for the first"
    )
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--commit")
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell starts background commands without SIGINT
        signal.signal(number, signal.default_int_handler)
    on_gpus = args.device == "cuda"
    layout = args.layout or ("tp2" if on_gpus else "tp2-pp2-dp2")
    extra = [*(ON_GPUS if on_gpus else "").split(), *args.arguments.split()]
    ranks = GpuRanks() if on_gpus else warm_ranks()
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        faults = draw_faults(args.steps, args.seed)
        result = soak(ranks, Path(folder).resolve(), layout, args.steps, faults, extra, args.timeout)
        growing = sorted({name for rank in result["resources"] for name in rank["growing"]})
        whole = result["stopped"] is None
        write(args.out, header(args.commit) | result)
        good = whole and result["lost"] is None and not growing
        if not good and args.out is not None:
            logs = sorted(Path(folder).glob("job/*/rank*.err"))
            texts = [f"== {log.parent.name}/{log.name}\n{log.read_text(errors='replace')[-20_000:]}" for log in logs]
            args.out.with_suffix(".log").write_text("\n".join(texts) + "\n")
        ranks.close()
    said = "" if whole else f"; stopped {result['stopped']}"
    print(f"{result['trained']} steps, {result['compared']} compared{said}; lost: {result['lost']}; growing: "
          f"{', '.join(growing) or 'nothing'}")  # fmt: skip
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())

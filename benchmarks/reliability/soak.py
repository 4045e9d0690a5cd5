"""A long training with an update every 20 steps and a fault every 50, and its undisturbed replay.

python -m benchmarks.reliability.soak --steps N --out F.json                  # TP2 × PP2 × DP2 on eight CPU ranks
python -m benchmarks.reliability.soak --steps N --device cuda --layout tp2 --out F.json

On GPUs this command starts torchrun. Faults come from the table of the tests (tests/faults/table.py), drawn by a
seed. Every loss, gradient norm and map must be that of the replay, bit for bit, and what each
process holds must be flat after the first tenth: see :func:`flatness`.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from faults.campaign import NOT_REACHED, Job, LostError, lines_of  # noqa: E402  adds tests/distributed
from faults.table import Case, all_cases, ends  # noqa: E402
from launch import run_ranks  # noqa: E402
from warm_ranks import WarmRanks  # noqa: E402

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
_DETERMINISTIC = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
}
_DELAY_S = 3.0
RESIDENT_SHARE = 0.02
Body = dict[str, Any]


class GpuRanks:
    """Starts ranks by torchrun, each with a GPU of its own, as :class:`WarmRanks` does on the CPU."""

    def run(self, ranks: int, args: Sequence[str], *, env: Mapping[str, str], grace: float, **options: Any) -> Any:
        options["tmp"].mkdir(parents=True, exist_ok=True)
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(ranks)))}
        return run_ranks(ranks, args, env=devices | _DETERMINISTIC | dict(env), **options)

    def close(self) -> None:
        """Do nothing."""


def draw_faults(steps: int, seed: int) -> dict[int, Case]:
    """Return step → fault, one in every 50 steps, none in the first and the last of them. None ends the job."""
    drawn, cases = random.Random(seed), [case for case in all_cases() if not ends(case)]
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

    Returns what came of it; ``lost`` says what a fault has cost. One whose update was skipped, because the map before
    it was late, costs nothing.
    """
    count, cases = LAYOUTS[layout][0], list(faults.values())
    started = time.perf_counter()
    job = Job(
        ranks, folder / "job", LAYOUTS[layout], cases, _DELAY_S, first=UPDATES, interval=UPDATES, lag=LAG,
        due=list(faults), steps=steps, extra=[*SNIP, *extra], sample_every=max(1, steps // 200), timeout=timeout,
    )  # fmt: skip
    body: Body = {"layout": layout, "ranks": count, "steps": steps}
    try:
        job.run()
    except LostError as error:
        return body | {"lost": str(error)}
    lost = [f"{cases[index]}: {why}" for index, why in job.lost.items() if why != NOT_REACHED]
    kinds = [event["event"] for event in read_events(folder / "job" / "run")]
    counts = {kind: kinds.count(kind) for kind in ("submit", "adopt", "solve_failed", "dropped", "sidecar_restart")}
    return body | {
        "lost": lost or None,
        "seconds": round(time.perf_counter() - started, 1),
        "events": counts,
        "faults": [
            {"from_step": step, **case._asdict(), "outcome": job.outcomes.get(index, NOT_REACHED)}
            for index, (step, case) in enumerate(faults.items())
        ],
        "resources": [flatness(lines_of(folder / "job", f"resources{rank}")) for rank in range(count)],
    }


def flatness(samples: Sequence[Mapping[str, int]]) -> Body:
    """Judge what one process held at the samples of a training. The first tenth is left out.

    Each figure is [median of the second tenth, median of the last tenth]. Descriptors, threads and bytes of device
    memory are flat if they grow by one at most, resident memory by :data:`RESIDENT_SHARE`. The run directory grows by
    the records of steps and updates, so that its bytes a step must stay the same: those of the last third are at most
    1.25 times those of the second one. Bytes that a fault has removed stay counted.
    """
    tenth = max(1, len(samples) // 10)
    first, last = samples[tenth : 2 * tenth], samples[-tenth:]
    body: Body = {}
    growing = []
    for name, most in (("descriptors", 1.0), ("threads", 1.0), ("device", 1.0), ("resident", None)):
        ends = [statistics.median(sample[name] for sample in part) for part in (first, last)]
        body[name] = [int(end) for end in ends]
        if ends[1] - ends[0] > (RESIDENT_SHARE * ends[0] if most is None else most):
            growing.append(name)
    if samples[-1]["files"]:
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
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="of the training, and of its replay")
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--commit")
    args = parser.parse_args()
    on_gpus = args.device == "cuda"
    layout = args.layout or ("tp2" if on_gpus else "tp2-pp2-dp2")
    extra = [*(ON_GPUS if on_gpus else "").split(), *args.arguments.split()]
    ranks = GpuRanks() if on_gpus else WarmRanks()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        try:
            faults = draw_faults(args.steps, args.seed)
            result = soak(ranks, Path(folder), layout, args.steps, faults, extra, args.timeout)
        finally:
            ranks.close()
    write(args.out, header(args.commit) | result)
    growing = sorted({name for rank in result.get("resources", []) for name in rank["growing"]})
    print(f"lost: {result['lost']}; growing: {', '.join(growing) or 'nothing'}")
    return int(result["lost"] is not None or bool(growing))


if __name__ == "__main__":
    sys.exit(main())

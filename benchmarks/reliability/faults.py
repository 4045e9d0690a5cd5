"""Every fault of the table of the tests at every moment, under every layout (tests/faults/table.py).

python -m benchmarks.reliability.faults --out FILE.json

Cases that the file has are not run again. A training goes through a dozen cases, one an update, and is judged by its
own replay (tests/faults/job.py). The exit code is 1 if a fault cost a training something.
"""

import argparse
import contextlib
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from faults.job import Job, Layout, LostError  # noqa: E402  adds tests/distributed
from faults.table import MOMENTS, Case, all_cases, ends_process  # noqa: E402

from benchmarks.common import commit, write  # noqa: E402

LAYOUTS: dict[str, Layout] = {
    "TP2×PP2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"),
    "DP2×EP2": (2, "--use-distributed-optimizer --expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2"
                " --moe-ffn-hidden-size 96 --moe-token-dispatcher-type alltoall"),
    "PP2, virtual stages": (2, "--num-layers 4 --pipeline-model-parallel-size 2"
                            " --num-layers-per-virtual-pipeline-stage 1"),
}  # fmt: skip
DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
"""Random numbers that an update must give back to a training."""
CASES = 24  # of a training
BY_TORCHRUN = ("recording", "adoption", "checkpoint")
"""Moments at which torchrun restarts the killed rank of one layout. Elsewhere the job is started again."""


def run_cases(
    warm: Any, folder: Path, layout: str, cases: Sequence[Case], delay: float, torchrun: bool = False
) -> list[dict[str, Any]]:
    """Run one training with the cases. Returns a line for each."""
    job = Job(warm, folder, LAYOUTS[layout], cases, delay, torchrun, extra=DROPOUT)
    why = None
    try:
        job.run()
    except (LostError, subprocess.TimeoutExpired) as error:
        why = " ".join(str(error).split())[-600:]
    return [
        case._asdict() | {"layout": layout, "outcome": job.outcomes.get(index), "lost": job.lost.get(index, why)}
        for index, case in enumerate(cases)
    ]


def chunks(layout: str) -> list[tuple[list[Case], bool]]:
    """Split the cases of a layout into trainings. Under the last layout torchrun itself restarts some killed ranks."""
    killed = [Case(moment, "rank killed") for moment in BY_TORCHRUN if layout == list(LAYOUTS)[-1]]
    by_job = [case for case in all_cases() if case not in killed]
    parts = [[case for case in by_job if ends_process(case) == kind] for kind in (False, True)]
    whole = [(part[i : i + CASES], False) for part in parts for i in range(0, len(part), CASES)]
    return [*whole, *([(killed, True)] if killed else [])]


def main() -> int:
    from warm_ranks import WarmRanks  # needs plotly

    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability.faults", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="result file, written after every training")
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=LAYOUTS, metavar="LAYOUT")
    parser.add_argument("--delay", type=float, default=30.0, help="seconds of a delay and of a stalled disk")
    parser.add_argument("--commit", help="commit of the cases that are run (default: git's)")
    args = parser.parse_args()
    body = json.loads(args.out.read_text()) if args.out.exists() else {"seconds": 0, "results": []}
    results = [line for line in body["results"] if not line["lost"]]
    judged = {(line["layout"], line["moment"], line["fault"]) for line in results}
    order = [(layout, moment) for layout in LAYOUTS for moment in MOMENTS]
    began, date = time.monotonic(), datetime.datetime.now(datetime.UTC).date().isoformat()
    with contextlib.closing(WarmRanks()) as warm:
        for layout, (chunk, torchrun) in [(name, each) for name in args.layouts for each in chunks(name)]:
            cases = [case for case in chunk if (layout, *case) not in judged]
            if not cases:
                continue
            with tempfile.TemporaryDirectory(prefix="faults-") as folder:
                lines = run_cases(warm, Path(folder).resolve() / "job", layout, cases, args.delay, torchrun)
            results += [line | {"commit": commit(args.commit)} for line in lines]
            results.sort(key=lambda line: (order.index((line["layout"], line["moment"])), line["fault"]))
            lost = [line for line in lines if line["lost"]]
            seconds = time.monotonic() - began
            print(f"{seconds:6.0f} s  {layout}: {len(lines)} cases, {len(lost)} lost", *lost, sep="\n", flush=True)
            head = {"schema": "snip.faults/3", "date": date, "delay_s": args.delay}
            head |= {"seconds": round(body["seconds"] + seconds), "cases": len(results)}
            write(args.out, head | {"lost": sum(bool(line["lost"]) for line in results), "results": results})
    return int(any(line["lost"] for line in results))


if __name__ == "__main__":
    sys.exit(main())

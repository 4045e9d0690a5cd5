"""``python -m faults.campaign --count 200 --seed N --out FILE.json``: faults into real trainings, each judged.

Run it in the folder ``tests`` (or with it on PYTHONPATH). ``--resume`` goes on where a campaign was stopped: the plan
follows from count, seed and kinds. ``FILE.md`` gets a table of kinds and outcomes. The exit code is 1 if anything was
lost.
"""

import argparse
import collections
import contextlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from warm_ranks import WarmRanks

from faults.delayed import run_delayed
from faults.injection import write_json
from faults.jobs import run_batch
from faults.kinds import KINDS
from faults.plan import Batch, make_plan

SCHEMA = "snip.faults/1"


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    plan = make_plan(args.count, args.seed, args.kinds)
    identity = {"count": args.count, "seed": args.seed, "kinds": args.kinds}
    body = {"schema": SCHEMA, **identity, "machine": _machine(), "delayed": None, "results": []}
    if args.resume:
        body |= _earlier(args.out, identity)
    done = body["results"]
    have = {result["batch"] for result in done}
    write_json(args.out, body)
    root = Path(tempfile.mkdtemp(prefix="faults-", dir=args.tmp))
    try:
        for results in run_all([b for b in plan if b.index not in have], root):
            done.extend(results)
            done.sort(key=lambda result: result["number"])
            write_json(args.out, body)
            _report(results, len(done), args.count)
        if args.delay and body["delayed"] is None:
            with contextlib.closing(WarmRanks()) as warm:
                body["delayed"] = run_delayed(warm, root / "delayed", args.delay)
            print(f"solver delayed: {body['delayed']}", flush=True)
            write_json(args.out, body)
    finally:
        if args.keep:
            print(f"kept: {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)
    args.out.with_suffix(".md").write_text(table(body) + "\n")
    lost = [result for result in done if result["lost"]]
    print(f"{len(done)} faults of {len({r['kind'] for r in done})} kinds, {len(lost)} lost something")
    late = body["delayed"] is not None and body["delayed"]["wait_s"] >= body["delayed"]["step_s"]
    return 1 if lost or late else 0


def run_all(batches: list[Batch], root: Path) -> Iterator[list[dict[str, Any]]]:
    """Results of batches as they end, on warm ranks."""
    with contextlib.closing(WarmRanks()) as warm:
        for batch in batches:
            results = run_batch(batch, warm, root)
            if not any(result["lost"] for result in results):
                shutil.rmtree(root / f"batch{batch.index:03d}", ignore_errors=True)
            yield results


def table(body: dict[str, Any]) -> str:
    """Kinds × outcomes with how often each came, lost ones first."""
    rows: dict[str, collections.Counter[str]] = {}
    for result in body["results"]:
        outcome = f"**lost**: {result['lost']}" if result["lost"] else result["outcome"]
        rows.setdefault(result["kind"], collections.Counter())[outcome] += 1
    total, lost = len(body["results"]), sum(bool(result["lost"]) for result in body["results"])
    lines = [f"{total} faults of {len(rows)} kinds, seed {body['seed']}: {lost} lost something.", ""]
    lines += ["| kind | faults | outcome (times) |", "|---|---:|---|"]
    for kind, outcomes in rows.items():
        text = "; ".join(f"{outcome} ({times})" for outcome, times in outcomes.most_common())
        lines.append(f"| {kind} | {sum(outcomes.values())} | {text} |")
    if (late := body.get("delayed")) is not None:
        parts = ", ".join(f"{kind} {1e3 * seconds:.1f}" for kind, seconds in late["waits"].items())
        lines += [
            "",
            f"Solver delayed by {late['delay_s']:g} s: {late['steps_meanwhile']} steps trained meanwhile, the decision"
            f" postponed {late['postponed']} times; Σ `wait_s` of the update {1e3 * late['wait_s']:.1f} ms ({parts}),"
            f" one step {1e3 * late['step_s']:.1f} ms.",
        ]
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m faults.campaign", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="faults to inject; default 200")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the plan")
    parser.add_argument("--out", type=Path, required=True, help="result file, written after every training")
    parser.add_argument("--resume", action="store_true", help="keep what is in the result file")
    parser.add_argument("--kinds", nargs="*", default=[], metavar="KIND", help="only these kinds")
    parser.add_argument("--delay", type=float, default=60.0, help="seconds of the delayed solver's run; 0: none")
    shared = Path("/dev/shm")
    default = shared if shared.is_dir() else None
    parser.add_argument("--tmp", type=Path, default=default, help="where trainings work; default: memory if there")
    parser.add_argument("--keep", action="store_true", help="keep the folders of trainings that lost something")
    args = parser.parse_args(argv)
    for kind in args.kinds:
        if kind not in KINDS:
            parser.error(f"unknown kind {kind!r}; one of: {', '.join(KINDS)}")
    return args


def _earlier(path: Path, identity: dict[str, Any]) -> dict[str, Any]:
    if not path.exists():
        return {}
    body = json.loads(path.read_text())
    if any(body.get(name) != value for name, value in identity.items()):
        sys.exit(f"{path}: is of another campaign; give its --count, --seed and --kinds, or another --out")
    return {"results": list(body["results"]), "delayed": body.get("delayed")}


def _machine() -> dict[str, Any]:
    import torch

    return {"cores": os.cpu_count(), "python": platform.python_version(), "torch": str(torch.__version__)}


def _report(results: list[dict[str, Any]], done: int, count: int) -> None:
    kinds = collections.Counter(result["kind"] for result in results)
    print(f"[{done}/{count}] " + ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())), flush=True)
    for result in results:
        if result["lost"]:
            print(f"  LOST {result['number']} {result['kind']} at step {result['step']}: {result['lost']}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

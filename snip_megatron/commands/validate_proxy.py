"""``snip validate-proxy``: compares estimators with measured divergences, and tells how fast scores become stale."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snip_megatron.commands.compare import ENVIRONMENT, alone, devices, select_gpus, stop_on_signals
from snip_megatron.errors import SnipError, cut
from snip_megatron.evaluation import compare
from snip_megatron.evaluation.data import load_data
from snip_megatron.evaluation.experiment import load_experiment
from snip_megatron.evaluation.pages import write_page
from snip_megatron.evaluation.proxy import Validation, find_tables, validate
from snip_megatron.evaluation.proxy_tables import proxy_markdown, stale_markdown
from snip_megatron.evaluation.recording import Recording, record_truth
from snip_megatron.evaluation.runner import Pool
from snip_megatron.evaluation.staleness import stale, summarise
from snip_megatron.records.storage import dump_json, write_atomically
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.statistics.table import StatisticsTable

PROXY_SCHEMA, STALE_SCHEMA = "snip.proxy/1", "snip.stale/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``snip validate-proxy``."""
    parser.add_argument(
        "sources",
        nargs="+",
        type=Path,
        metavar="SOURCE",
        help="run directory or statistics file recorded with --snip-estimator measured; or an experiment file (.json,"
        " .toml), whose warm checkpoints are measured first",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/proxy"),
        metavar="DIR",
        help="folder for the results; default: runs/proxy",
    )
    parser.add_argument("--format", default="fp4", metavar="NAME", help="format to compare; default: fp4")
    parser.add_argument(
        "--stale", action="store_true", help="show how scores age: compare the updates of each run with each other"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=0.75,
        metavar="SHARE",
        help="fp4 share of the maps that --stale compares, 0 to 1; default: 0.75",
    )
    recording = parser.add_argument_group("measuring an experiment's checkpoints")
    recording.add_argument("--data", type=Path, metavar="DIR", help="folder that snip prepare-data wrote")
    recording.add_argument(
        "--work", type=Path, metavar="DIR", help="folder for checkpoints and logs; default: OUT/work"
    )
    recording.add_argument(
        "--steps", metavar="N,N", help="steps of the checkpoints to measure; default: all that the warm run keeps"
    )
    recording.add_argument(
        "--probe-microbatches", type=int, default=2, metavar="B", help="microbatches of each measured batch; default: 2"
    )
    recording.add_argument(
        "--gpus", default="auto", metavar="auto|N", help="number of GPUs to use; 0: the CPU; default: auto, all GPUs"
    )
    recording.add_argument("--time-limit", type=float, metavar="S", help="end within S seconds; default: no limit")


def run(args: argparse.Namespace) -> int:
    """Run the comparison and write its results. Returns 0. Raises SnipError on bad input."""
    if args.stale:
        return _stale(args)
    SolveRequest(formats=(args.format,))  # raises SnipError for bf16, and for what is not a format of all GEMMs
    validations: list[Validation] = []
    for source in args.sources:
        if source.suffix in (".json", ".toml"):
            for step, folder in _record(args, source):
                validations += _validate(folder, args.format, f"{source.stem}, checkpoint of {step} steps")
        else:
            validations += _validate(source, args.format, source.name)
    text = proxy_markdown(validations)
    body = {"schema": PROXY_SCHEMA, "machine": _facts(args), "validations": [v.as_dict() for v in validations]}
    _write(args.out, "proxy", body, text, lambda: _proxy_figures(validations))
    return 0


def _validate(source: Path, fmt: str, name: str) -> list[Validation]:
    tables = [StatisticsTable.load(path) for path in find_tables(source)]
    measured = [table for table in tables if table.measured is not None]
    if not measured:
        raise SnipError(f"{source}: nothing was measured there; record it with --snip --snip-estimator measured")
    return [validate(table, fmt, name) for table in measured]


def _record(args: argparse.Namespace, path: Path) -> list[tuple[int, Path]]:
    experiment = load_experiment(path)
    if experiment.warm is None:
        raise SnipError(f"{path}: has no warm checkpoint to measure")
    if args.data is None:
        raise SnipError("--data DIR is missing: the folder that snip prepare-data made")
    steps = (*experiment.warm.save, experiment.warm.steps) if args.steps is None else _steps(args.steps)
    deadline = None if args.time_limit is None else time.monotonic() + args.time_limit
    pool = Pool(devices(select_gpus(args.gpus), experiment.training.ranks, 1), ENVIRONMENT, deadline)
    recording = Recording(args.probe_microbatches, args.format, steps)
    work, data = (args.work or args.out / "work").resolve(), load_data(args.data, experiment.tokenizer)
    stopped = stop_on_signals(pool)
    with alone(work):
        try:
            return record_truth(experiment, data, work, recording, pool)
        except SnipError as error:
            if not stopped:
                raise
            why = f"stopped by {signal.Signals(stopped[0]).name}; the same command measures again"
            raise SnipError(why, exit_code=128 + stopped[0]) from error


def _steps(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise SnipError(f"--steps {cut(text)}: expected numbers of steps, comma separated")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _stale(args: argparse.Namespace) -> int:
    if not 0.0 <= args.budget <= 1.0:
        raise SnipError(f"--budget {args.budget:g}: must lie between 0 and 1")
    bodies, texts, figures = [], [], []
    for source in args.sources:
        tables = [StatisticsTable.load(path) for path in find_tables(source)]
        request = SolveRequest(formats=tables[0].formats, target=args.budget)
        pairs = stale(tables, request)
        summaries = summarise(pairs)
        bodies.append({"source": source.name, "summary": _dicts(summaries), "pairs": _dicts(pairs)})
        texts.append(stale_markdown(summaries, source.name))
        figures.append((source.name, summaries))
    body = {"schema": STALE_SCHEMA, "machine": _facts(args), "runs": bodies}

    def draw() -> list[tuple[str, Any]]:
        from snip_megatron.evaluation.plots import stale_figure

        return [(f"Staleness: {name}", stale_figure(summaries)) for name, summaries in figures]

    _write(args.out, "stale", body, "\n".join(texts), draw)
    return 0


def _proxy_figures(validations: Sequence[Validation]) -> list[tuple[str, Any]]:
    from snip_megatron.evaluation.plots import proxy_figure

    return [
        (f"{v.source}, step {v.step}: {kind} by {estimator}", proxy_figure(v, kind, estimator))
        for v in validations
        for kind, estimators in (("loss", ("measured again", "noise")), ("drift", ("measured again", "noise")))
        for estimator in estimators
        if any(estimator in scores for scores in v.points[kind].values())
    ]


def _write(out: Path, name: str, body: Any, text: str, draw: Any) -> None:
    try:
        write_atomically(out / f"{name}.json", dump_json(body).encode())
        write_atomically(out / f"{name}.md", text.encode())
        write_page(out / f"{name}.html", name, text, draw())
    except OSError as error:
        raise SnipError(f"--out {out}: cannot be written ({error})") from None
    print(text)


def _facts(args: argparse.Namespace) -> dict[str, Any]:
    return compare.facts(select_gpus(args.gpus))


def _dicts(records: Sequence[Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(record) for record in records]

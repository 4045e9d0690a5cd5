"""Compares the scores of estimators with measured divergences.

python -m benchmarks.quality.validate_proxy EXPERIMENT.json --data … --work …    # measure at its warm checkpoints
python -m benchmarks.quality.validate_proxy RUN … [--format fp4]                 # compare in a run that has measured
"""

import argparse
import dataclasses
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import result_text
from benchmarks.quality.compare import (
    ENVIRONMENT,
    add_training_arguments,
    alone,
    command,
    devices,
    select_gpus,
    stop_on_signals,
)
from benchmarks.quality.experiment import load_experiment
from benchmarks.quality.models import load_data
from benchmarks.quality.proxy import Validation, find_tables, proxy_markdown, validate
from benchmarks.quality.runner import Pool, describe
from benchmarks.quality.truth import load_truth
from benchmarks.quality.warm import record_truth
from snip_megatron.precision.errors import SnipError
from snip_megatron.precision.formats import FORMATS, Format, Gemm
from snip_megatron.runtime.storage import deliver
from snip_megatron.sensitivity.table import StatisticsTable

PROXY_SCHEMA = "snip.proxy/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    text = (
        "experiment file, at whose warm checkpoints every option is forced alone; or statistics of such a measurement"
    )
    parser.add_argument("sources", nargs="+", type=Path, metavar="SOURCE", help=text)
    add_training_arguments(parser, Path("runs/proxy"), "proxy.json and proxy.md")
    names = [each.value for each in FORMATS if each is not Format.BF16 and len(each.gemms) == len(Gemm)]
    parser.add_argument("--format", default="fp4", choices=names, help="format to compare; default: fp4")
    text = "microbatches of each measured batch; default: 2"
    parser.add_argument("--probe-microbatches", type=int, default=2, metavar="B", help=text)


def run(args: argparse.Namespace) -> int:
    """Run the comparison and write its results. Returns 0. Raises SnipError on bad input."""
    validations: list[Validation] = []
    for source in args.sources:
        if source.suffix == ".json":
            for step, folder in _record(args, source):
                validations += _validate(folder, args.format, f"{source.stem}, checkpoint of {step} steps")
        else:
            validations += _validate(source, args.format, source.name)
    text = proxy_markdown(validations)
    body = {
        "schema": PROXY_SCHEMA,
        "machine": describe(select_gpus(args.gpus)),
        "validations": [dataclasses.asdict(each) for each in validations],
    }
    deliver("--out", args.out / "proxy.json", result_text(body))
    deliver("--out", args.out / "proxy.md", text)
    print(text)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code."""
    return command("validate_proxy", __doc__, add_arguments, run, argv)


def _validate(source: Path, fmt: str, name: str) -> list[Validation]:
    return [validate(StatisticsTable.load(path), *load_truth(path), fmt, name) for path in find_tables(source)]


def _record(args: argparse.Namespace, path: Path) -> list[tuple[int, Path]]:
    experiment = load_experiment(path)
    if experiment.warm is None:
        raise SnipError(f"{path}: has no warm checkpoint to measure")
    deadline = None if args.time_limit is None else time.monotonic() + args.time_limit
    pool = Pool(devices(select_gpus(args.gpus), experiment.training.ranks, 1), ENVIRONMENT, deadline)
    work, data = (args.work or args.out / "work").resolve(), load_data(args.data, experiment.tokenizer)
    stopped = stop_on_signals(pool)
    with alone(work):
        try:
            return record_truth(experiment, data, work, args.format, args.probe_microbatches, pool)
        except SnipError as error:
            if not stopped:
                raise
            why = f"stopped by {signal.Signals(stopped[0]).name}; the same command measures again"
            raise SnipError(why, exit_code=128 + stopped[0]) from error


if __name__ == "__main__":
    sys.exit(main())

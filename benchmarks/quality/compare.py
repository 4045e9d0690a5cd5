"""Trains the policies of experiment files side by side and compares their losses.

python -m benchmarks.quality.compare EXPERIMENT.json … --data DIR [--out DIR] [--resume] [--dry-run] [--report]
"""

import argparse
import dataclasses
import fcntl
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from benchmarks.quality.comparison import Comparison, make_part
from benchmarks.quality.experiment import Experiment, load_experiment
from benchmarks.quality.models import Data, load_data
from benchmarks.quality.results import Results, load_results
from benchmarks.quality.runner import Pool, describe, visible_gpus
from benchmarks.quality.runs import experiment_runs, fill, training_command, warm_arguments
from benchmarks.quality.tables import markdown
from snip_megatron.precision.errors import SnipError, cut, located
from snip_megatron.runtime.config import parse_snip_arguments, resolve_arguments
from snip_megatron.runtime.storage import deliver

INCOMPLETE, SOME_FAILED = 4, 1
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
ENVIRONMENT = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",  # a world of one: the store takes any free port
    "OMP_NUM_THREADS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS is bitwise repeatable with it
    "PYTHONWARNINGS": "ignore",
    "PYTHONUNBUFFERED": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "WANDB_MODE": "disabled",
    "GLOO_SOCKET_IFNAME": "lo",
}
"""Environment of a training process. It runs without torchrun on one rank."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    text = "experiment files (snip.experiment/1); with --report, result files"
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=text)
    add_training_arguments(parser, Path("runs/compare"), "NAME.json and NAME.md")
    text = "runs at the same time on each GPU, or on the CPU; default: 8 on a GPU, 1 on the CPU and for several ranks"
    parser.add_argument("--per-gpu", type=int, default=None, metavar="K", help=text)
    parser.add_argument("--resume", action="store_true", help="continue from the results in OUT")
    parser.add_argument("--dry-run", action="store_true", help="print the runs and their commands; train nothing")
    parser.add_argument("--report", action="store_true", help="write the tables of result files again; train nothing")


def add_training_arguments(parser: argparse.ArgumentParser, out: Path, files: str) -> None:
    """Add what all commands take that train for an experiment file."""
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="folder that snip prepare-data wrote")
    add("--out", type=Path, default=out, metavar="DIR", help=f"folder for the results {files}; default: {out}")
    add("--work", type=Path, metavar="DIR", help="folder for checkpoints, run directories and logs; default: OUT/work")
    add("--gpus", default="auto", metavar="auto|N", help="number of GPUs to use; 0: the CPU; default: auto, all GPUs")
    add("--time-limit", type=float, metavar="S", help="end within S seconds; default: no limit")


def run(args: argparse.Namespace) -> int:
    """Run the experiments. Raises SnipError on bad input.

    Returns exit code 0 if all runs are complete, 1 if runs failed, 4 if runs are left because of the time limit, and
    128 + n after signal n.
    """
    if args.report:
        for path in args.files:
            _report(_checked_results(path), path.parent)
        return 0
    experiments = [load_experiment(path) for path in args.files]
    names = [experiment.name for experiment in experiments]
    if len(set(names)) != len(names):
        raise SnipError(
            f"two experiments are named {cut(max(names, key=names.count))}: their results would be one file"
        )
    parts_data = [load_data(args.data, experiment.tokenizer) for experiment in experiments]
    for experiment, data in zip(experiments, parts_data, strict=True):
        _check_settings(experiment, data)
    if args.dry_run:
        return _dry_run(experiments, parts_data)
    return _train(args, experiments, parts_data)


def _check_settings(experiment: Experiment, data: Data) -> None:
    """Raise SnipError for a run whose arguments SNIP would refuse, or that would end before its first map."""
    for run in experiment_runs(experiment, data):
        with located(f"{experiment.name}: {run.title}"):
            words = fill(run.arguments, {"data": str(data.folder)})
            config = resolve_arguments(parse_snip_arguments(words))
            adopted = config.first_update + config.lag
            if config.updates and adopted >= experiment.schedule(run.kind):
                raise SnipError(f"its first map would come at step {adopted}, after the last one; give more steps")


def _train(args: argparse.Namespace, experiments: list[Experiment], datas: list[Data]) -> int:
    started = time.monotonic()
    gpus = select_gpus(args.gpus)
    ranks = _ranks(experiments)
    slots = devices(gpus, ranks, args.per_gpu)
    if args.time_limit is not None and not args.time_limit > 0:
        raise SnipError(f"--time-limit {args.time_limit:g}: must be positive")
    work = (args.work or args.out / "work").resolve()
    with ExitStack() as locks:
        locks.enter_context(alone(work))
        for experiment in experiments:
            path = _result_path(args.out, experiment)
            busy = f"{path}: another comparison writes it; wait for it or give another --out"
            locks.enter_context(_locked(path.with_name(f".{path.name}.lock"), busy))
        parts = [
            make_part(experiment, data, _results(args, experiment, data), work)
            for experiment, data in zip(experiments, datas, strict=True)
        ]
        deadline = None if args.time_limit is None else started + args.time_limit
        pool = Pool(slots, dict(ENVIRONMENT), deadline)
        comparison = Comparison(parts, pool, work, describe(gpus))
        stopped = stop_on_signals(pool)
        missing = comparison.run()
        for part in parts:
            part.results.save()
            _report(part.results, args.out)
    return _exit_code(comparison, missing, stopped)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code."""
    return command("compare", __doc__, add_arguments, run, argv)


def command(
    name: str,
    description: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
    argv: Sequence[str] | None,
) -> int:
    """Parse the arguments and run. Returns the exit code. A SnipError is printed as one line."""
    parser = argparse.ArgumentParser(name, description=description, formatter_class=argparse.RawTextHelpFormatter)
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except SnipError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code


@contextmanager
def alone(work: Path) -> Iterator[None]:
    """Lock the folder ``work``: two comparisons there would remove each other's run directories.

    The trainings inherit the lock. It lasts until the last one ends, if the comparison is killed before. Raises
    SnipError if the folder cannot be written, or another comparison runs there.
    """
    busy = f"{work}: another comparison, or a training that it left, runs there; wait for it or give another --work"
    with _locked(work / "lock", busy) as lock:
        os.set_inheritable(lock.fileno(), True)
        yield


@contextmanager
def _locked(path: Path, busy: str) -> Iterator[IO[str]]:
    """Hold a lock on the file ``path``. Raises SnipError with the message ``busy`` if another process holds it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        raise SnipError(f"{path.parent}: cannot be written ({error.strerror})") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SnipError(busy) from None
        except OSError:  # a file system without locks
            pass
        yield lock


def _ranks(experiments: list[Experiment]) -> int:
    """Return the number of ranks of a run. Raises SnipError if it is not the same in all experiments."""
    counts = {experiment.training.ranks for experiment in experiments}
    if len(counts) > 1:
        raise SnipError(f"training.ranks: {', '.join(map(str, sorted(counts)))}: compare these experiments one by one")
    return counts.pop()


def devices(gpus: list[str], ranks: int, per_device: int | None) -> list[str | None]:
    """Return the GPUs of each run that may run at a time, as CUDA_VISIBLE_DEVICES. None for the CPU."""
    if per_device is None:
        per_device = 8 if gpus and ranks == 1 else 1
    if per_device < 1:
        raise SnipError(f"--per-gpu {per_device}: must be at least 1")
    if not gpus:
        return [None] * per_device
    groups = [",".join(gpus[i : i + ranks]) for i in range(0, len(gpus) - ranks + 1, ranks)]
    if not groups:
        raise SnipError(f"training.ranks: {ranks}: a run needs as many GPUs, and {len(gpus)} are used")
    return [group for _ in range(per_device) for group in groups]


def _exit_code(comparison: Comparison, missing: int, stopped: list[int]) -> int:
    if missing:
        print(f"compare: {missing} runs are left; the same command with --resume goes on", file=sys.stderr)
    if stopped:
        return 128 + stopped[0]
    if comparison.failed:
        return SOME_FAILED
    return INCOMPLETE if missing else 0


def _result_path(out: Path, experiment: Experiment) -> Path:
    return out / f"{experiment.name}.json"


def _results(args: argparse.Namespace, experiment: Experiment, data: Data) -> Results:
    path = _result_path(args.out, experiment)
    body = json.loads(json.dumps(dataclasses.asdict(experiment)))
    text = {"sha256": data.sha256, "tokens": data.tokens, "valid_tokens": data.valid_tokens}
    if not path.exists():
        return Results(path, body, text)
    if not args.resume:
        raise SnipError(f"{path}: exists; add --resume to go on from it or choose another --out")
    results = _checked_results(path)
    if results.data != text:
        raise SnipError(f"{path}: was made from other text than --data {args.data}; give that, or another --out")
    results.experiment = body
    # Tables show the last run of a policy and seed. Runs with settings that the file had earlier therefore come first.
    current = {run.identity(data, sha) for run in experiment_runs(experiment, data) for sha in (None, *results.warm)}
    results.runs = dict(sorted(results.runs.items(), key=lambda run: run[0] in current))
    return results


def _checked_results(path: Path) -> Results:
    """Read a result file. Raises SnipError if it is damaged, which shows when its tables are made."""
    results = load_results(path)
    try:
        markdown(results)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = cut(f"{type(error).__name__}: {error}")
        raise SnipError(f"{path}: is no result file of compare ({why})") from None
    return results


def select_gpus(count: str) -> list[str]:
    """Return the GPUs that ``--gpus`` selects. An empty list means the CPU. Raises SnipError on a bad value."""
    if count == "0":
        return []
    visible = visible_gpus()
    if count == "auto":
        return visible
    if not count.isdecimal():
        raise SnipError(f"--gpus {cut(count)}: expected auto or a number")
    if int(count) > len(visible):
        raise SnipError(f"--gpus {count}: this machine has {len(visible)}")
    return visible[: int(count)]


def stop_on_signals(pool: Pool) -> list[int]:
    """End the pool's processes on a signal of :data:`STOPS`, unless it is ignored, as SIGHUP under nohup.

    The processes have groups of their own, so that neither a key nor a terminal that closes ends them. Returns the
    list that the signal is added to.
    """
    received: list[int] = []

    def stop(number: int, frame: Any) -> None:
        received.append(number)
        pool.stop()

    for number in STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
    return received


def _dry_run(experiments: list[Experiment], datas: list[Data]) -> int:
    shared = " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
    print(f"# environment of every run: {shared}")
    for experiment, data in zip(experiments, datas, strict=True):
        runs, ranks = experiment_runs(experiment, data), experiment.training.ranks
        print(f"# {experiment.name}: {len(runs)} runs")
        if experiment.warm is not None:
            print(f"# warm checkpoint, {experiment.warm.steps} steps")
            print(shlex.join(training_command(warm_arguments(experiment, data, experiment.warm), ranks, "python")))
        for run in runs:
            print(f"# {run.title}, {run.steps} steps")
            print(shlex.join(training_command(run.arguments, run.ranks, "python")))
    return 0


def _report(results: Results, out: Path) -> None:
    """Write NAME.md beside the results, and its text to standard output."""
    text = markdown(results)
    deliver("--out", out / f"{results.path.stem}.md", text)
    print(text)


if __name__ == "__main__":
    sys.exit(main())

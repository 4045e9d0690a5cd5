"""Measurement of sensitivities at the checkpoints of an experiment's warm run, through the training entry."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from snip_megatron.errors import SnipError
from snip_megatron.evaluation.data import Data
from snip_megatron.evaluation.experiment import Experiment
from snip_megatron.evaluation.runner import Job, Outcome, Pool
from snip_megatron.evaluation.runs import fill, training_arguments, training_command
from snip_megatron.evaluation.warm import WarmCheckpoint, warm_checkpoint


def record_truth(
    experiment: Experiment, data: Data, work: Path, steps: Sequence[int], fmt: str, microbatches: int, pool: Pool
) -> list[tuple[int, Path]]:
    """Measure at checkpoints of the warm run, which is trained if its checkpoints do not exist.

    Each option alone is forced to ``fmt``, on two disjoint batches of so many microbatches. ``work`` is the folder for
    checkpoints and run directories. Returns (step, run directory) of each checkpoint. Raises SnipError if the warm run
    keeps no checkpoint of a step, a process fails twice, or the time is over.
    """
    warm = warm_checkpoint(experiment, data, work)
    known = (*warm.warm.save, warm.warm.steps)
    for step in steps:
        if step not in known:
            raise SnipError(f"--steps {step}: the warm run keeps checkpoints of {', '.join(map(str, known))} steps")
    if warm.sha256 is None:
        _run(pool, [warm.job(work / "logs")])
    folders = [(step, work / "proxy" / f"{warm.folder.name}_{step}") for step in steps]
    _run(pool, [_job(warm, step, folder, fmt, microbatches, work / "logs") for step, folder in folders])
    return folders


def _run(pool: Pool, jobs: Sequence[Job]) -> None:
    failed: list[Outcome] = []

    def ended(outcome: Outcome) -> None:
        print(f"snip validate-proxy: {outcome.job.name}: {outcome.seconds:.0f} s", file=sys.stderr, flush=True)
        if outcome.error is not None:
            failed.append(outcome)

    pool.add(jobs)
    left = pool.run(ended)
    if failed:
        raise SnipError(f"{failed[0].job.name} failed twice: {failed[0].error} (log: {failed[0].job.log})", exit_code=1)
    if left:
        raise SnipError(f"{left} recordings did not end in time; raise --time-limit", exit_code=1)


def _job(warm: WarmCheckpoint, step: int, folder: Path, fmt: str, microbatches: int, logs: Path) -> Job:
    """Return the job of two steps after a checkpoint: the first gives the gradient norm, the second measures."""
    arguments = [
        *training_arguments(warm.experiment, warm.data, warm.warm.seed),
        *("--eval-interval", "1000000000", "--eval-iters", "0", "--exit-interval", str(step + 2)),
        *("--load", "{warm}", "--ckpt-step", str(step), "--ckpt-format", "torch_dist"),
        *("--snip", "--snip-settings", '{"truth": true, "backward_noise": true}'),
        *("--snip-probe-microbatches", str(microbatches)),
        # Any format, with four bits or not, meets this budget.
        *("--snip-formats", fmt, "--snip-budget", "fp4=0", "--snip-first-update", str(step + 1)),
        *("--snip-update-interval", "1000000", "--snip-lag", "1", "--snip-dir", "{run}"),
        *("--data-cache-path", "{run}/cache"),
    ]
    folders = {"data": str(warm.data.folder), "warm": str(warm.folder), "run": str(folder)}

    def check() -> None:
        if not (folder / "stats" / f"step_{step + 1}.npz").is_file():
            raise ValueError("no statistics were written")

    return Job(
        name=f"truth after {step} steps",
        command=training_command(fill(arguments, folders), warm.experiment.training.ranks),
        log=logs / f"{folder.name}.txt",
        before=lambda: shutil.rmtree(folder, ignore_errors=True),
        check=check,
    )

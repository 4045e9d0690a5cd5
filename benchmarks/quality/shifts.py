"""What a stale map costs when the text or the learning rate changes in mid-run, and what updates and the guard do.

    python -m benchmarks.quality.shifts EXPERIMENT.json --data D --other D2 --work W --out F.json [--per-gpu 9]

Every policy continues the experiment's warm checkpoint, which is trained if it is missing, and saves after ``--before``
steps. From there it goes on for ``--after`` steps as it was, with the text of ``--other``, and with the learning rate
back at its highest. All runs of a shift see equal batches. The policies are bf16; one map of the first steps that
stays; and maps that are renewed every ``--interval`` steps. The excess of a loss is that over bf16 in the same step.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import header, write
from benchmarks.quality.compare import ENVIRONMENT, devices, select_gpus
from benchmarks.quality.experiment import Experiment, load_experiment
from benchmarks.quality.models import Data, load_data
from benchmarks.quality.runner import Job, Outcome, Pool
from benchmarks.quality.runs import fill, training_arguments, training_command
from benchmarks.quality.warm import WarmCheckpoint, warm_checkpoint
from snip_megatron.runtime.run_data import read_events, read_metrics

POLICIES = ("bf16", "stale", "updated")
SHIFTS = ("none", "text", "rate")
NEVER = "1000000000"
WINDOW = 10
"""Steps over which a mean excess is reported, before the shift, after it, and at the end."""
_RATE = re.compile(r"learning rate: ([0-9.E+-]+)")
TOLD = {"guard": ("action", "reason"), "adopt": ("changed", "fp4_fraction"), "skipped": ("reason",)}


class Shifts:
    """The runs. ``work`` holds their checkpoints and run directories."""

    def __init__(self, arguments: argparse.Namespace, experiment: Experiment, warm: WarmCheckpoint) -> None:
        self._given, self._experiment, self._warm = arguments, experiment, warm
        self._start = warm.warm.steps
        self._shift = self._start + arguments.before
        self._folder: Path = arguments.work / "shifts"

    def directory(self, policy: str, shift: str | None) -> Path:
        """Return the run directory of a policy, up to the shift or after it."""
        return self._folder / f"{policy}-{shift or 'before'}"

    def job(self, policy: str, shift: str | None, data: Data) -> Job:
        """Return the training up to the shift (None), or on from there."""
        directory, saved = self.directory(policy, shift), self._folder / f"{policy}-saved"
        loaded, first = (self._warm.folder, self._start) if shift is None else (saved, self._shift)
        last = self._shift if shift is None else self._shift + self._given.after
        arguments = [
            *training_arguments(self._experiment, data, self._given.seed),
            *("--eval-interval", NEVER, "--eval-iters", "0", "--exit-interval", str(last), "--log-interval", "1"),
            *("--load", str(loaded), "--ckpt-step", str(first), "--ckpt-format", "torch_dist"),
            *("--data-cache-path", f"{directory}/cache", "--snip-dir", str(directory), *self._snip(policy)),
        ]
        if shift is None:
            arguments += ["--save", str(saved), "--save-interval", str(self._shift)]
        if shift == "rate":
            arguments += ["--override-opt-param-scheduler", "--lr-decay-iters", NEVER]

        def before() -> None:
            shutil.rmtree(directory, ignore_errors=True)
            if shift is not None:
                shutil.copytree(self.directory(policy, None), directory)

        return Job(
            name=directory.name,
            command=training_command(fill(arguments, {"data": str(data.folder)}), self._experiment.training.ranks),
            log=self._log(policy, shift),
            before=before,
        )

    def _snip(self, policy: str) -> list[str]:
        common = ["--snip", "--snip-seed", str(self._given.seed)]
        if policy == "bf16":
            return [*common, "--snip-policy", "bf16"]
        interval = NEVER if policy == "stale" else str(self._given.interval)
        return [
            *(*common, "--snip-budget", self._given.budget, "--snip-formats", self._given.formats),
            *("--snip-first-update", str(self._start + 1), "--snip-update-interval", interval),
            *("--snip-lag", "1", "--snip-wait", "600"),
        ]

    def row(self, shift: str) -> dict[str, Any]:
        """Return losses, excesses over bf16 and events of all policies around a shift."""
        losses = {policy: self._losses(policy, shift) for policy in POLICIES}
        rates = [self._rate("bf16", None, -1), self._rate("bf16", shift, 0)]
        row: dict[str, Any] = {"learning_rates": rates, "bf16": {"losses": losses["bf16"]}}
        for policy in POLICIES[1:]:
            excess = {step: losses[policy][step] - loss for step, loss in losses["bf16"].items()}
            spans = {
                "before": range(self._shift - WINDOW, self._shift),
                "after": range(self._shift, self._shift + WINDOW),
                "end": range(self._shift + self._given.after - WINDOW, self._shift + self._given.after),
            }
            row[policy] = {
                "excess": {name: statistics.fmean(excess[step] for step in span) for name, span in spans.items()},
                "largest": max((excess[step], step - self._shift) for step in excess if step >= self._shift),
                "events": self._events(policy, shift),
                "losses": losses[policy],
            }
        return row

    def _rate(self, policy: str, shift: str | None, index: int) -> float:
        """Return the learning rate that a training printed at one of its steps."""
        return float(_RATE.findall(self._log(policy, shift).read_text(encoding="utf-8"))[index])

    def _log(self, policy: str, shift: str | None) -> Path:
        return self._folder / "logs" / f"{self.directory(policy, shift).name}.txt"

    def _losses(self, policy: str, shift: str) -> dict[int, float]:
        return {m["step"]: m["loss"] for m in read_metrics(self.directory(policy, shift)) if m["loss"] is not None}

    def _events(self, policy: str, shift: str) -> list[dict[str, Any]]:
        """Return what happened after the shift, with its step counted from there."""
        return [
            {"steps_after": event["step"] - self._shift, "event": event["event"]}
            | {name: event.get(name) for name in TOLD[event["event"]]}
            for event in read_events(self.directory(policy, shift))
            if event["event"] in TOLD and event["step"] >= self._shift
        ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Losses under old and new maps after a shift of text or learning rate")
    parser.add_argument("experiment", type=Path, help="experiment file with a warm run")
    parser.add_argument("--data", type=Path, required=True, help="text of the warm run, made by snip prepare-data")
    parser.add_argument("--other", type=Path, required=True, help="text after the shift, in the same tokenizer")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints and run directories")
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--before", type=int, default=40, help="steps from the warm checkpoint to the shift")
    parser.add_argument("--after", type=int, default=60, help="steps after the shift")
    parser.add_argument("--interval", type=int, default=20, help="steps between two updates of the policy updated")
    parser.add_argument("--budget", default="fp4=0.9")
    parser.add_argument("--formats", default="fp8,fp4")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gpus", default="auto", help="number of GPUs; 0: the CPU")
    parser.add_argument("--per-gpu", type=int, default=1, help="trainings side by side on a GPU, or on the CPU")
    parser.add_argument("--commit", help="what is measured, where the tree has no .git")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 if a training failed."""
    arguments = parse(argv)
    arguments.work = arguments.work.resolve()
    experiment = load_experiment(arguments.experiment)
    data, other = (load_data(folder, experiment.tokenizer) for folder in (arguments.data, arguments.other))
    warm = warm_checkpoint(experiment, data, arguments.work)
    shifts = Shifts(arguments, experiment, warm)
    slots = devices(select_gpus(arguments.gpus), experiment.training.ranks, arguments.per_gpu)
    pool = Pool(slots, ENVIRONMENT)
    failed: list[Outcome] = []

    def ended(outcome: Outcome) -> None:
        print(f"{outcome.job.name}: {outcome.error or f'{outcome.seconds:.0f} s'}", file=sys.stderr, flush=True)
        if outcome.error is not None:
            failed.append(outcome)
        elif outcome.job.name.endswith("-before"):
            policy = outcome.job.name.removesuffix("-before")
            pool.add([shifts.job(policy, shift, other if shift == "text" else data) for shift in SHIFTS])

    if warm.sha256 is None:
        pool.add([warm.job(arguments.work / "logs")])
        pool.run(ended)
    if not failed:
        pool.add([shifts.job(policy, None, data) for policy in POLICIES])
        pool.run(ended)
    if failed:
        return 1
    named = ("before", "after", "interval", "budget", "formats", "seed")
    settings = {name: getattr(arguments, name) for name in named}
    result = header(arguments.commit) | {"experiment": experiment.name, "data": data.sha256, "other": other.sha256}
    result |= {"warm": warm.sha256, "settings": settings, "shifts": {shift: shifts.row(shift) for shift in SHIFTS}}
    write(arguments.out, result)
    for shift, row in result["shifts"].items():
        for policy in POLICIES[1:]:
            excess = ", ".join(f"{name} {value:+.4f}" for name, value in row[policy]["excess"].items())
            events = [event["event"] for event in row[policy]["events"]]
            print(f"{shift:5s} {policy:8s} over bf16: {excess}; events: {', '.join(events) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

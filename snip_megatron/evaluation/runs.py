"""What an experiment trains, as command lines of the training entry.

Recorded arguments have ``{data}``, ``{warm}`` and ``{run}`` for folders, so that a run is the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from snip_megatron.evaluation.data import Data
from snip_megatron.evaluation.experiment import Candidate, Experiment, Phase, Training, Warm
from snip_megatron.evaluation.models import model

MODULE = "snip_megatron.pretrain_gpt"
NEVER = "1000000000"


@dataclass(frozen=True)
class Run:
    """One training run. ``budget``: wanted fp4 share, None where the policy ignores it; ``steps``: trained here."""

    kind: str
    label: str
    policy: str
    granularity: str | None
    budget: float | None
    seed: int
    steps: int
    arguments: tuple[str, ...]

    def identity(self, data: Data, warm_sha256: str | None) -> str:
        """Hash of the full argument list, the text and the checkpoint's weights: equal runs on any machine."""
        body = [list(self.arguments), data.sha256, warm_sha256 if self.kind == "from_warm" else None]
        return _sha256(body)[:20]

    @property
    def title(self) -> str:
        """Short name for progress and messages."""
        budget = "" if self.budget is None else f" {100 * self.budget:g} %"
        return f"{self.label}{budget} seed {self.seed}" + (" from scratch" if self.kind == "from_scratch" else "")


def experiment_runs(experiment: Experiment, data: Data) -> list[Run]:
    """Every run, seed by seed, references first: what is cut short has whole seeds that can be compared."""
    runs = []
    for phase in experiment.phases:
        for seed in phase.seeds:
            candidates = sorted(phase.candidates, key=lambda c: not c.fixed)
            runs += [run for candidate in candidates for run in _runs(experiment, data, phase, candidate, seed)]
    return runs


def warm_arguments(experiment: Experiment, data: Data, warm: Warm) -> list[str]:
    """The run that makes the warm checkpoint in ``{warm}``: bf16, ended after ``warm.steps`` of the whole schedule."""
    interval = math.gcd(warm.steps, *warm.save)
    return [
        *training_arguments(experiment, data, warm.seed),
        *("--eval-interval", NEVER, "--eval-iters", "0", "--exit-interval", str(warm.steps)),
        *("--save", "{warm}", "--save-interval", str(interval), "--ckpt-format", "torch_dist"),
    ]


def warm_identity(experiment: Experiment, data: Data, warm: Warm) -> str:
    """Hash of what makes the warm checkpoint."""
    return _sha256([warm_arguments(experiment, data, warm), data.sha256])[:20]


def training_arguments(experiment: Experiment, data: Data, seed: int) -> list[str]:
    """Model, text and training as the warm run and its branches have them, without SNIP's arguments."""
    return _common(experiment, data, _schedule(experiment, "from_warm"), seed)


def primer_arguments(experiment: Experiment, data: Data) -> list[str]:
    """Four steps from scratch with an update: they compile the kernels that all branches find in the cache."""
    return [
        *training_arguments(experiment, data, 1),
        *("--train-iters", "4", "--lr-warmup-iters", "0", "--eval-interval", NEVER, "--eval-iters", "0"),
        *("--snip", "--snip-first-update", "1", "--snip-update-interval", "100", "--snip-lag", "1"),
        *("--snip-wait", "60", "--snip-dir", "{run}", "--data-cache-path", "{run}/cache"),
    ]


def fill(arguments: tuple[str, ...] | list[str], folders: Mapping[str, str]) -> list[str]:
    """Arguments with the folders' names in place of ``{data}``, ``{warm}``, ``{run}``."""
    filled = []
    for argument in arguments:
        for name, folder in folders.items():
            argument = argument.replace(f"{{{name}}}", folder)
        filled.append(argument)
    return filled


def _runs(experiment: Experiment, data: Data, phase: Phase, candidate: Candidate, seed: int) -> list[Run]:
    budgets = phase.budgets if candidate.budgets is None else candidate.budgets
    start = experiment.warm.steps if experiment.warm is not None and phase.kind == "from_warm" else 0
    common = _common(experiment, data, _schedule(experiment, phase.kind), seed)
    batch = experiment.training.sequence * experiment.training.global_batch
    common += ["--eval-interval", NEVER, "--eval-iters", str(-(-experiment.validation_tokens // batch))]
    if phase.kind == "from_warm":
        common += ["--load", "{warm}", "--ckpt-step", str(start), "--ckpt-format", "torch_dist"]
    common += ["--snip", "--snip-eval", "both", "--snip-seed", str(seed), "--snip-dir", "{run}"]
    common += ["--data-cache-path", "{run}/cache"]
    runs: list[Run] = []
    for budget in (None,) if candidate.fixed else budgets:
        granularity = None if budget is None else candidate.granularity or phase.granularity
        own = _policy(phase, candidate, granularity, budget, start)
        arguments = (*common, *own, *candidate.arguments)
        label, policy = candidate.label, candidate.policy
        runs.append(Run(phase.kind, label, policy, granularity, budget, seed, phase.steps, arguments))
    return runs


def _policy(phase: Phase, candidate: Candidate, granularity: str | None, budget: float | None, start: int) -> list[str]:
    """Arguments of the policy; one that chooses nothing has no others, so that all experiments share its runs."""
    arguments = ["--snip-policy", candidate.policy]
    if budget is None or granularity is None:
        return arguments
    arguments += ["--snip-budget", f"fp4={budget:g}", "--snip-granularity", granularity]
    arguments += ["--snip-formats", ",".join(phase.formats)]
    updates = phase.updates
    for name, value in (("first-update", start + updates.first), ("update-interval", updates.interval)):
        arguments += [f"--snip-{name}", str(value)]
    arguments += ["--snip-lag", str(updates.lag), "--snip-wait", f"{updates.wait:g}"]
    for name, text in (("estimator", candidate.estimator), ("q", candidate.q)):
        arguments += [] if text is None else [f"--snip-{name}", text]
    return arguments


def _common(experiment: Experiment, data: Data, total_steps: int, seed: int) -> list[str]:
    training = experiment.training
    return [
        *model(experiment.model).arguments(training.sequence),
        *data.arguments,
        *_training(training),
        *("--train-iters", str(total_steps), "--seed", str(seed), "--log-interval", "100"),
        *training.arguments,
    ]


def _training(training: Training) -> list[str]:
    values = {
        "--global-batch-size": str(training.global_batch),
        "--micro-batch-size": str(training.micro_batch),
        "--lr": f"{training.lr:g}",
        "--min-lr": f"{training.min_lr:g}",
        "--lr-decay-style": "cosine",
        "--lr-warmup-iters": str(training.warmup_steps),
        "--weight-decay": f"{training.weight_decay:g}",
        "--adam-beta2": f"{training.beta2:g}",
        "--clip-grad": f"{training.clip_grad:g}",
    }
    return [text for pair in values.items() for text in pair]


def _schedule(experiment: Experiment, kind: str) -> int:
    """Steps of the learning rate's schedule: branches go on where the warm run stopped on the same one."""
    steps = {phase.kind: phase.steps for phase in experiment.phases}
    if kind == "from_scratch":
        return steps[kind]
    return (experiment.warm.steps if experiment.warm else 0) + steps.get("from_warm", 0)


def _sha256(body: object) -> str:
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()

"""The runs of an experiment as command lines of the training entry.

Recorded arguments contain the placeholders ``{data}``, ``{warm}`` and ``{run}`` instead of folders, so that they are
the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snip_megatron.evaluation.data import Data
from snip_megatron.evaluation.experiment import Candidate, Experiment, Phase, Training, Warm
from snip_megatron.evaluation.models import model
from snip_megatron.sensitivity.fixed import fixed_formats

MODULE = "snip_megatron.pretrain_gpt"
NEVER = "1000000000"
CHECKPOINT = "checkpoint"
"""Folder of the final weights in the run directory of a phase with ``save``."""


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        kind: ``from_warm`` or ``from_scratch``.
        label: the policy's name in tables.
        policy: the policy.
        granularity: ``gemm`` or ``layer``; None if the policy ignores it.
        budget: the wanted fp4 share; None if the policy ignores it.
        seed: the seed of data order and of SNIP.
        steps: number of training steps of this run, without those of the warm run.
        arguments: the recorded arguments.
        ranks: number of ranks.
    """

    kind: str
    label: str
    policy: str
    granularity: str | None
    budget: float | None
    seed: int
    steps: int
    arguments: tuple[str, ...]
    ranks: int = 1

    def identity(self, data: Data, warm_sha256: str | None) -> str:
        """Return the hash of the arguments, the text, the warm weights and the number of ranks if there are several.

        Equal runs have the same on any machine.
        """
        body = [list(self.arguments), data.sha256, warm_sha256 if self.kind == "from_warm" else None]
        return _sha256(_with_ranks(body, self.ranks))[:20]

    @property
    def title(self) -> str:
        """Short name of the run for messages."""
        budget = "" if self.budget is None else f" {100 * self.budget:g} %"
        return f"{self.label}{budget} seed {self.seed}" + (" from scratch" if self.kind == "from_scratch" else "")


def experiment_runs(experiment: Experiment, data: Data) -> list[Run]:
    """Return all runs, ordered by seed with reference policies first.

    A comparison that is interrupted has therefore complete seeds, which can be compared.
    """
    runs = []
    for phase in experiment.phases:
        for seed in phase.seeds:
            candidates = sorted(phase.candidates, key=lambda c: not c.fixed)
            runs += [run for candidate in candidates for run in _runs(experiment, data, phase, candidate, seed)]
    return runs


def warm_arguments(experiment: Experiment, data: Data, warm: Warm) -> list[str]:
    """Return the arguments of the bf16 run that makes the warm checkpoint in ``{warm}``.

    It ends after ``warm.steps`` steps of the learning rate schedule that the branches continue.
    """
    interval = math.gcd(warm.steps, *warm.save)
    return [
        *training_arguments(experiment, data, warm.seed),
        *("--eval-interval", NEVER, "--eval-iters", "0", "--exit-interval", str(warm.steps)),
        *("--save", "{warm}", "--save-interval", str(interval), "--ckpt-format", "torch_dist"),
    ]


def warm_identity(experiment: Experiment, data: Data, warm: Warm) -> str:
    """Return the hash of the arguments and the text that make the warm checkpoint."""
    return _sha256(_with_ranks([warm_arguments(experiment, data, warm), data.sha256], experiment.training.ranks))[:20]


def training_arguments(experiment: Experiment, data: Data, seed: int) -> list[str]:
    """Return the common arguments of the warm run and its branches: model, text and training, without SNIP's."""
    return _common(experiment, data, experiment.schedule("from_warm"), seed)


def primer_arguments(experiment: Experiment, data: Data) -> list[str]:
    """Return the arguments of a run of four steps with an update, which fills Triton's kernel cache."""
    return [
        *training_arguments(experiment, data, 1),
        *("--train-iters", "4", "--lr-warmup-iters", "0", "--eval-interval", NEVER, "--eval-iters", "0"),
        *("--snip", "--snip-first-update", "1", "--snip-update-interval", "100", "--snip-lag", "1"),
        *("--snip-wait", "60", "--snip-dir", "{run}", "--data-cache-path", "{run}/cache"),
    ]


def training_command(arguments: Sequence[str], ranks: int, python: str = sys.executable) -> list[str]:
    """Return the command line of a training of ``ranks`` ranks on this machine."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)) if ranks > 1 else ()
    return [python, *torchrun, "-m", MODULE, *arguments]


def fill(arguments: tuple[str, ...] | list[str], folders: Mapping[str, str]) -> list[str]:
    """Replace the placeholders ``{data}``, ``{warm}`` and ``{run}`` by folders."""
    filled = []
    for argument in arguments:
        for name, folder in folders.items():
            argument = argument.replace(f"{{{name}}}", folder)
        filled.append(argument)
    return filled


def _runs(experiment: Experiment, data: Data, phase: Phase, candidate: Candidate, seed: int) -> list[Run]:
    budgets = phase.budgets_of(candidate)
    start = experiment.warm.steps if experiment.warm is not None and phase.kind == "from_warm" else 0
    common = _common(experiment, data, experiment.schedule(phase.kind), seed)
    batch = experiment.training.sequence * experiment.training.global_batch
    common += ["--eval-interval", NEVER, "--eval-iters", str(-(-experiment.validation_tokens // batch))]
    if phase.kind == "from_warm":
        common += ["--load", "{warm}", "--ckpt-step", str(start), "--ckpt-format", "torch_dist"]
    if phase.save:  # Megatron saves after the last step, before it validates
        common += ["--save", f"{{run}}/{CHECKPOINT}", "--save-interval", NEVER, "--ckpt-format", "torch_dist"]
        common += ["--no-save-optim", "--no-save-rng"]
    common += ["--snip", "--snip-eval", "both", "--snip-seed", str(seed), "--snip-dir", "{run}"]
    common += ["--data-cache-path", "{run}/cache"]
    runs: list[Run] = []
    for budget in (None,) if candidate.fixed else budgets:
        granularity = None if budget is None else candidate.granularity or phase.granularity
        own = _policy(phase, candidate, granularity, budget, start)
        arguments = (*common, *own, *candidate.arguments)
        label, policy = candidate.label, candidate.policy
        ranks = experiment.training.ranks
        runs.append(Run(phase.kind, label, policy, granularity, budget, seed, phase.steps, arguments, ranks))
    return runs


def _policy(phase: Phase, candidate: Candidate, granularity: str | None, budget: float | None, start: int) -> list[str]:
    """Return the arguments of the policy.

    A fixed policy has no further arguments than the formats, if its map depends on them, so that experiments with
    different settings share its runs.
    """
    arguments = ["--snip-policy", candidate.policy]
    if budget is None or granularity is None:
        own = fixed_formats(candidate.policy, phase.formats) != fixed_formats(candidate.policy)
        return [*arguments, "--snip-formats", ",".join(phase.formats)] if own else arguments
    arguments += ["--snip-budget", f"fp4={_exact(budget)}", "--snip-granularity", granularity]
    arguments += ["--snip-formats", ",".join(phase.formats)]
    updates = phase.updates
    for name, value in (("first-update", start + updates.first), ("update-interval", updates.interval)):
        arguments += [f"--snip-{name}", str(value)]
    arguments += ["--snip-lag", str(updates.lag), "--snip-wait", _exact(updates.wait)]
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
        "--lr": _exact(training.lr),
        "--min-lr": _exact(training.min_lr),
        "--lr-decay-style": "cosine",
        "--lr-warmup-iters": str(training.warmup_steps),
        "--weight-decay": _exact(training.weight_decay),
        "--adam-beta2": _exact(training.beta2),
        "--clip-grad": _exact(training.clip_grad),
    }
    return [text for pair in values.items() for text in pair]


def _exact(value: float) -> str:
    """Return the shortest text that is read as ``value``, without ``.0``."""
    return short if float(short := f"{value:g}") == value else repr(value)


def _with_ranks(body: list[Any], ranks: int) -> list[Any]:
    return [*body, ranks] if ranks > 1 else body


def _sha256(body: object) -> str:
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()

"""The runs of an experiment as command lines of the training entry.

Recorded arguments contain the placeholders ``{data}``, ``{warm}`` and ``{run}`` instead of folders, so that they are
the same on every machine.
"""

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.quality.experiment import Candidate, Experiment, Phase, Warm
from benchmarks.quality.models import Data, model
from snip_megatron.sensitivity.policies import fixed_formats

MODULE = "snip_megatron.pretrain_gpt"
WEIGHTS_ALONE = ("--no-save-optim", "--no-save-rng")
NEVER = "1000000000"
CHECKPOINT = "checkpoint"
"""Folder of the final weights in the run directory of a phase with ``save``."""


@dataclass(frozen=True)
class Run:
    """One training run. Granularity and ``budget``, the wanted fp4 share, are None if the policy ignores them.

    The seed is that of data order and of SNIP; the steps are without those of the warm run; the arguments are recorded.
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
        """Return the hash of arguments, text, warm weights and ranks, which is the same on any machine."""
        body = [list(self.arguments), data.sha256, warm_sha256 if self.kind == "from_warm" else None]
        return _sha256(body, self.ranks)

    @property
    def title(self) -> str:
        """Short name of the run for messages."""
        budget = "" if self.budget is None else f" {100 * self.budget:g} %"
        return f"{self.label}{budget} seed {self.seed}" + (" from scratch" if self.kind == "from_scratch" else "")


def experiment_runs(experiment: Experiment, data: Data) -> list[Run]:
    """Return all runs by seed, reference policies first: what is interrupted has whole seeds to compare."""
    return [
        _run(experiment, data, phase, candidate, seed, budget)
        for phase in experiment.phases
        for seed in phase.seeds
        for candidate in sorted(phase.candidates, key=lambda c: not c.fixed)
        for budget in ((None,) if candidate.fixed else phase.budgets_of(candidate))
    ]


def warm_arguments(experiment: Experiment, data: Data, warm: Warm) -> list[str]:
    """Return the arguments of the bf16 run that makes ``{warm}``, the begin of the branches' learning rate schedule."""
    interval = math.gcd(warm.steps, *warm.save)
    return [
        *training_arguments(experiment, data, warm.seed),
        *("--eval-interval", NEVER, "--eval-iters", "0", "--exit-interval", str(warm.steps)),
        *("--save", "{warm}", "--save-interval", str(interval), "--ckpt-format", "torch_dist"),
    ]


def warm_identity(experiment: Experiment, data: Data, warm: Warm) -> str:
    """Return the hash of the arguments and the text that make the warm checkpoint."""
    return _sha256([warm_arguments(experiment, data, warm), data.sha256], experiment.training.ranks)


def training_arguments(experiment: Experiment, data: Data, seed: int, kind: str = "from_warm") -> list[str]:
    """Return the arguments of model, text and training, without SNIP's, for the learning rate schedule of ``kind``."""
    training = experiment.training
    values = {
        "--global-batch-size": str(training.global_batch),
        "--micro-batch-size": str(training.micro_batch),
        "--lr": _exact(training.lr),
        "--min-lr": _exact(training.min_lr),
        "--lr-decay-style": "cosine",
        "--lr-warmup-iters": str(training.warmup_steps),
        "--weight-decay": "0.1",
        "--adam-beta2": "0.95",
        "--clip-grad": "1",
        "--train-iters": str(experiment.schedule(kind)),
        "--seed": str(seed),
        "--log-interval": "100",
    }
    return [
        *model(experiment.model).arguments(training.sequence),
        *data.arguments,
        *(text for pair in values.items() for text in pair),
        *training.arguments,
    ]


def training_command(
    arguments: Sequence[str], ranks: int, python: str = sys.executable, module: str = MODULE
) -> list[str]:
    """Return the command line of a training of ``ranks`` ranks on this machine.

    Megatron cannot load an optimizer and random states that it does not save: a run from a warm checkpoint saves them.
    """
    if "--load" in arguments:
        arguments = [argument for argument in arguments if argument not in WEIGHTS_ALONE]
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)) if ranks > 1 else ()
    return [python, *torchrun, "-m", module, *arguments]


def fill(arguments: Sequence[str], folders: Mapping[str, str]) -> list[str]:
    """Replace the placeholders ``{data}``, ``{warm}`` and ``{run}`` by folders."""
    filled = []
    for argument in arguments:
        for name, folder in folders.items():
            argument = argument.replace(f"{{{name}}}", folder)
        filled.append(argument)
    return filled


def _run(
    experiment: Experiment, data: Data, phase: Phase, candidate: Candidate, seed: int, budget: float | None
) -> Run:
    start = experiment.warm.steps if experiment.warm is not None and phase.kind == "from_warm" else 0
    granularity = None if budget is None else candidate.granularity or phase.granularity
    arguments = training_arguments(experiment, data, seed, phase.kind)
    batch = experiment.training.sequence * experiment.training.global_batch
    arguments += ["--eval-interval", NEVER, "--eval-iters", str(-(-experiment.validation_tokens // batch))]
    if phase.kind == "from_warm":
        arguments += ["--load", "{warm}", "--ckpt-step", str(start), "--ckpt-format", "torch_dist"]
    if phase.save:  # Megatron saves after the last step, before it validates
        arguments += ["--save", f"{{run}}/{CHECKPOINT}", "--save-interval", NEVER, "--ckpt-format", "torch_dist"]
        arguments += WEIGHTS_ALONE
    arguments += ["--snip", "--snip-eval", "both", "--snip-seed", str(seed), "--snip-dir", "{run}"]
    arguments += ["--data-cache-path", "{run}/cache", "--snip-policy", candidate.policy]
    settings = candidate.settings or {}
    if candidate.policy == "snip" and "--snip-estimator" not in candidate.arguments:
        arguments += ["--snip-estimator", "noise"]  # the default when these experiments were written
    if budget is None or granularity is None:
        arguments += _fixed(phase, candidate)
    else:
        for name, value in _solved(phase, granularity, budget, start).items():
            arguments += [] if name in settings else [f"--snip-{name.replace('_', '-')}", value]
    if settings:
        arguments += ["--snip-settings", json.dumps(dict(settings), sort_keys=True)]
    return Run(
        kind=phase.kind,
        label=candidate.label,
        policy=candidate.policy,
        granularity=granularity,
        budget=budget,
        seed=seed,
        steps=phase.steps,
        arguments=(*arguments, *candidate.arguments),
        ranks=experiment.training.ranks,
    )


def _fixed(phase: Phase, candidate: Candidate) -> list[str]:
    """Return the arguments of a fixed map: formats only if they matter, so that experiments share its runs."""
    differs = fixed_formats(candidate.policy, phase.formats) != fixed_formats(candidate.policy)
    return ["--snip-formats", ",".join(phase.formats)] if differs else []


def _solved(phase: Phase, granularity: str, budget: float, start: int) -> dict[str, str]:
    """Return SNIP's fields of a policy whose maps are solved for a budget."""
    return {
        "budget": f"fp4={_exact(budget)}",
        "granularity": granularity,
        "formats": ",".join(phase.formats),
        "first_update": str(start + phase.updates.first),
        "update_interval": str(phase.updates.interval),
        "lag": str(phase.updates.lag),
        "wait": _exact(phase.updates.wait),
    }


def _exact(value: float) -> str:
    """Return the shortest text that is read as ``value``, without ``.0``."""
    return short if float(short := f"{value:g}") == value else repr(value)


def _sha256(body: list[Any], ranks: int) -> str:
    return hashlib.sha256(json.dumps([*body, ranks] if ranks > 1 else body).encode()).hexdigest()[:20]

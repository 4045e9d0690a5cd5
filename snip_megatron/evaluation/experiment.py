"""The experiment file of ``snip compare``. README.md beside this file describes the format."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snip_megatron.errors import SnipError, quoted
from snip_megatron.evaluation.fields import Fields
from snip_megatron.evaluation.models import model
from snip_megatron.evaluation.planned import Planned, read_planned
from snip_megatron.precision import GRANULARITIES, Format
from snip_megatron.sensitivity.fixed import FIXED
from snip_megatron.sensitivity.policies import ESTIMATORS, POLICIES
from snip_megatron.sensitivity.quality import Q_RULES

SCHEMA = "snip.experiment/1"
TOKENIZERS = ("bytes", "bpe")
PHASES = ("from_warm", "from_scratch")
FORMATS = tuple(fmt.value for fmt in Format)
LONGEST = 200
"""Bytes that the name of an experiment or of a policy may have."""


@dataclass(frozen=True)
class Training:
    """The training settings of all runs: AdamW with linear warm-up and cosine decay over all steps.

    Attributes:
        sequence: tokens of a sequence.
        global_batch: sequences of a step.
        micro_batch: sequences of a microbatch.
        lr: maximum learning rate.
        min_lr: learning rate at the end.
        warmup_steps: steps of the learning rate's warm-up.
        weight_decay: weight decay.
        beta2: Adam's second beta.
        clip_grad: maximum gradient norm.
        arguments: further arguments for Megatron.
        ranks: ranks of each run, on as many GPUs. ``arguments`` has their layout.
    """

    sequence: int
    global_batch: int
    micro_batch: int
    lr: float
    min_lr: float
    warmup_steps: int
    weight_decay: float
    beta2: float
    clip_grad: float
    arguments: tuple[str, ...]
    ranks: int = 1


@dataclass(frozen=True)
class Warm:
    """The warm run, a bf16 training from whose checkpoint all branches start.

    Attributes:
        steps: number of training steps.
        seed: seed of the data order.
        save: earlier steps of which a checkpoint is kept.
    """

    steps: int
    seed: int
    save: tuple[int, ...]


@dataclass(frozen=True)
class Updates:
    """The update schedule of a run.

    Attributes:
        first: the first update, in steps after the run's start.
        interval: steps between two updates.
        lag: steps from an update to its adoption.
        wait: seconds for which training waits for the solver, so that schedules are repeatable.
    """

    first: int
    interval: int
    lag: int
    wait: float


@dataclass(frozen=True)
class Candidate:
    """A policy and its settings. ``label`` names it in tables. A setting of None is the phase's or SNIP's default."""

    label: str
    policy: str
    estimator: str | None
    q: str | None
    granularity: str | None
    budgets: tuple[float, ...] | None
    arguments: tuple[str, ...]

    @property
    def fixed(self) -> bool:
        """Whether the policy is a fixed map, which ignores the budget."""
        return self.policy in FIXED


@dataclass(frozen=True)
class Phase:
    """Runs of one kind, ``from_warm`` or ``from_scratch``, of ``steps`` training steps each.

    ``save`` keeps the final weights of every run, without optimizer state.
    """

    kind: str
    steps: int
    seeds: tuple[int, ...]
    granularity: str
    budgets: tuple[float, ...]
    formats: tuple[str, ...]
    updates: Updates
    candidates: tuple[Candidate, ...]
    save: bool = False

    def budgets_of(self, candidate: Candidate) -> tuple[float, ...]:
        """Return the budgets at which ``candidate`` runs: its own, or else those of the phase."""
        return self.budgets if candidate.budgets is None else candidate.budgets


@dataclass(frozen=True)
class Experiment:
    """An experiment file.

    Attributes:
        name: name of the result files.
        model: name of the model.
        tokenizer: ``bytes`` or ``bpe``.
        training: the training settings.
        validation_tokens: the minimum number of tokens of a final validation.
        warm: the run that makes the warm checkpoint; None without one.
        phases: the runs.
        planned: the announced comparisons. Holm's correction covers these, and no others.
    """

    name: str
    model: str
    tokenizer: str
    training: Training
    validation_tokens: int
    warm: Warm | None
    phases: tuple[Phase, ...]
    planned: tuple[Planned, ...] = ()

    def schedule(self, kind: str) -> int:
        """Return the steps of a phase's learning rate schedule. The warm run and its branches share one schedule."""
        warm = self.warm.steps if self.warm is not None and kind == "from_warm" else 0
        return warm + sum(phase.steps for phase in self.phases if phase.kind == kind)


def load_experiment(path: Path) -> Experiment:
    """Read a ``.json`` or ``.toml`` experiment. Raises SnipError naming the file, the field and the fault."""
    try:
        text = path.read_text(encoding="utf-8")
        body = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise SnipError(f"{path}: cannot be read ({error})") from None
    except (ValueError, RecursionError) as error:
        raise SnipError(f"{path}: not {'TOML' if path.suffix == '.toml' else 'JSON'} ({error})") from None
    return parse_experiment(body, str(path), path.stem)


def parse_experiment(body: Any, where: str, name: str) -> Experiment:
    """Parse an experiment. ``name`` is its default name. Raises SnipError naming ``where``, the field and the fault."""
    fields = Fields(body, where)
    if fields.text("schema") != SCHEMA:
        raise SnipError(f'{where}: "schema" must be "{SCHEMA}"')
    warm = _warm(fields.raw("warm"), fields.at("warm")) if fields.has("warm") else None
    phases = tuple(_phase(fields.raw(kind), fields.at(kind), kind) for kind in PHASES if fields.has(kind))
    if not phases:
        raise SnipError(f"{where}: has neither from_warm nor from_scratch: nothing to train")
    if warm is None and any(phase.kind == "from_warm" for phase in phases):
        raise SnipError(f"{where}: from_warm needs warm: the checkpoint to start from")
    experiment = Experiment(
        name=_printable(fields, "name", name, "/", "is no file name"),
        model=fields.text("model"),
        tokenizer=_choice(fields, "tokenizer", "bytes", TOKENIZERS),
        training=_training(fields.raw("training"), fields.at("training")),
        validation_tokens=fields.integer("validation_tokens", 262_144, least=1),
        warm=warm,
        phases=phases,
        planned=read_planned(fields, _budgets_by_label(phases)),
    )
    model(experiment.model)
    _check_warmup(experiment, where)
    fields.raw("comment")
    fields.close()
    return experiment


def _check_warmup(experiment: Experiment, where: str) -> None:
    """Refuse a warm-up as long as the learning rate schedule, which Megatron would refuse with an assertion."""
    warmup = experiment.training.warmup_steps
    for phase in experiment.phases:
        steps = experiment.schedule(phase.kind)
        if warmup >= steps:
            raise SnipError(
                f"{where}: training.warmup_steps: {warmup} must be less than the {steps} steps of {phase.kind}"
            )


def _training(body: Any, where: str) -> Training:
    fields = Fields(body, where)
    training = Training(
        sequence=fields.integer("sequence", least=1),
        global_batch=fields.integer("global_batch", least=1),
        micro_batch=fields.integer("micro_batch", least=1),
        lr=fields.number("lr"),
        min_lr=fields.number("min_lr", 0.0, most=fields.number("lr")),
        warmup_steps=fields.integer("warmup_steps", 0),
        weight_decay=fields.number("weight_decay", 0.1),
        beta2=fields.number("beta2", 0.95, most=1.0),
        clip_grad=fields.number("clip_grad", 1.0),
        arguments=fields.texts("arguments", ()),
        ranks=fields.integer("ranks", 1, least=1),
    )
    fields.close()
    if training.global_batch % training.micro_batch:
        raise SnipError(f"{fields.at('global_batch')}: {training.global_batch} is no multiple of micro_batch")
    return training


def _warm(body: Any, where: str) -> Warm:
    fields = Fields(body, where)
    warm = Warm(fields.integer("steps", least=1), fields.integer("seed", 1234, least=1), fields.integers("save", ()))
    fields.close()
    if any(not 0 < step < warm.steps for step in warm.save):
        raise SnipError(f"{fields.at('save')}: steps must lie between 0 and {warm.steps}")
    return warm


def _phase(body: Any, where: str, kind: str) -> Phase:
    fields = Fields(body, where)
    candidates = tuple(
        _candidate(entry, f"{fields.at('policies')}[{i}]") for i, entry in enumerate(_entries(fields, "policies"))
    )
    labels = [candidate.label for candidate in candidates]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise SnipError(
            f"{fields.at('policies')}: {quoted(twice)} stands there twice; give one of them a label of its own"
        )
    phase = Phase(
        kind=kind,
        steps=fields.integer("steps", least=1),
        seeds=fields.integers("seeds"),
        granularity=_choice(fields, "granularity", "gemm", GRANULARITIES),
        budgets=fields.numbers("budgets", ()),
        formats=tuple(_known(name, fields.at("formats"), FORMATS) for name in fields.texts("formats", ("fp8", "fp4"))),
        updates=_updates(fields.raw("updates") if fields.has("updates") else {}, fields.at("updates")),
        candidates=candidates,
        save=fields.flag("save", False),
    )
    fields.close()
    if not phase.seeds or 0 in phase.seeds:
        raise SnipError(f"{fields.at('seeds')}: give at least one, all positive (Megatron takes no 0)")
    if phase.updates.first == 0 and kind == "from_scratch":
        raise SnipError(f"{fields.at('updates')}: first must be at least 1 from scratch: AdamW has no moments before")
    for candidate in candidates:
        if not candidate.fixed and not phase.budgets_of(candidate):
            raise SnipError(f"{fields.at('budgets')}: {quoted(candidate.label)} needs at least one")
    return phase


def _budgets_by_label(phases: tuple[Phase, ...]) -> dict[str, dict[str, tuple[float, ...] | None]]:
    """Return kind → label → budgets of the policies; None for a fixed map."""
    return {
        phase.kind: {c.label: None if c.fixed else phase.budgets_of(c) for c in phase.candidates} for phase in phases
    }


def _entries(fields: Fields, name: str) -> list[Any]:
    entries = fields.raw(name)
    if not isinstance(entries, list) or not entries:
        raise SnipError(f"{fields.at(name)}: expected a list of policies")
    return entries


def _updates(body: Any, where: str) -> Updates:
    fields = Fields(body, where)
    updates = Updates(
        first=fields.integer("first", 1),
        interval=fields.integer("interval", 1_000_000, least=2),
        lag=fields.integer("lag", 1, least=1),
        wait=fields.number("wait", 600.0),
    )
    fields.close()
    return updates


def _candidate(body: Any, where: str) -> Candidate:
    fields = Fields({"policy": body} if isinstance(body, str) else body, where)
    policy = _choice(fields, "policy", None, POLICIES)
    candidate = Candidate(
        label=_printable(fields, "label", policy, "|", "does not fit in a table"),
        policy=policy,
        estimator=_choice(fields, "estimator", None, ESTIMATORS) if fields.has("estimator") else None,
        q=_choice(fields, "q", None, Q_RULES) if fields.has("q") else None,
        granularity=_choice(fields, "granularity", None, GRANULARITIES) if fields.has("granularity") else None,
        budgets=fields.numbers("budgets") if fields.has("budgets") else None,
        arguments=fields.texts("arguments", ()),
    )
    fields.close()
    return candidate


def _printable(fields: Fields, name: str, default: str, without: str, fault: str) -> str:
    """Return a text of at most ``LONGEST`` bytes, all printable, that lacks the character ``without``."""
    value = fields.text(name, default)
    if not value.isprintable() or without in value or len(value.encode()) > LONGEST:
        raise SnipError(
            f"{fields.at(name)}: {quoted(value)} {fault}: give at most {LONGEST} printable characters, none of them"
            f" {without}"
        )
    return value


def _choice(fields: Fields, name: str, default: str | None, known: Any) -> str:
    return _known(fields.text(name) if default is None else fields.text(name, default), fields.at(name), known)


def _known(value: str, where: str, known: Any) -> str:
    if value not in known:
        raise SnipError(f"{where}: {quoted(value)} is unknown; choose one of {', '.join(known)}")
    return value

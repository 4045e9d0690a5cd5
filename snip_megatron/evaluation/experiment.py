"""The experiment file of ``snip compare``. README.md beside this file describes the format."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snip_megatron.config import SnipConfig
from snip_megatron.errors import SnipError, quoted
from snip_megatron.evaluation.fields import (
    entry,
    flag,
    made_of,
    number,
    one_of,
    parse,
    several,
    text,
    text_without,
    whole,
)
from snip_megatron.evaluation.models import model
from snip_megatron.precision import GRANULARITIES, Format, strict
from snip_megatron.sensitivity.fixed import FIXED
from snip_megatron.sensitivity.policies import ESTIMATORS, POLICIES, Q_RULES

SCHEMA = "snip.experiment/1"
PHASES = ("from_warm", "from_scratch")
VALIDATIONS = ("map", "bf16")
"""Formats in which a run is validated."""
SETTINGS = frozenset(field.name for field in dataclasses.fields(SnipConfig))

_texts = several(text)
_budgets = several(number(most=1.0))


def _settings(value: Any, where: str) -> dict[str, Any]:
    """Read new values of SNIP's configuration, by the name of the field. The training checks the values."""
    if unknown := sorted(set(strict.mapping(value, where)) - SETTINGS):
        raise SnipError(f"{where}: {quoted(unknown[0])} is no field of the configuration (docs/arguments.md)")
    return dict(value)


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training settings of all runs: AdamW with linear warm-up and cosine decay over all steps.

    Each run has ``ranks`` ranks, on as many GPUs; ``arguments``, further ones for Megatron, have their layout.
    """

    sequence: int = entry(whole(1))
    global_batch: int = entry(whole(1))
    micro_batch: int = entry(whole(1))
    lr: float = entry(number())
    min_lr: float = entry(number(), 0.0)
    warmup_steps: int = entry(whole(), 0)
    weight_decay: float = entry(number(), 0.1)
    beta2: float = entry(number(most=1.0), 0.95)
    clip_grad: float = entry(number(), 1.0)
    arguments: tuple[str, ...] = entry(_texts, ())
    ranks: int = entry(whole(1), 1)


@dataclass(frozen=True)
class Warm:
    """The bf16 run from whose checkpoint all branches start; at the steps ``save`` it keeps earlier checkpoints."""

    steps: int = entry(whole(1))
    seed: int = entry(whole(1), 1234)
    save: tuple[int, ...] = entry(several(whole(), distinct=True), ())


@dataclass(frozen=True)
class Updates:
    """The update schedule of a run in steps, of which ``first`` counts from the run's start.

    For ``wait`` seconds training waits for the solver, so that schedules are repeatable.
    """

    first: int = entry(whole(), 1)
    interval: int = entry(whole(2), 1_000_000)
    lag: int = entry(whole(1), 1)
    wait: float = entry(number(), 600.0)


_UPDATES = Updates()


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A policy and its settings. ``label`` names it in tables. A setting of None is the phase's or SNIP's default."""

    policy: str = entry(one_of(POLICIES))
    label: str = entry(text_without("|"), "")
    estimator: str | None = entry(one_of(ESTIMATORS), None)
    q: str | None = entry(one_of(Q_RULES), None)
    granularity: str | None = entry(one_of(GRANULARITIES), None)
    budgets: tuple[float, ...] | None = entry(_budgets, None)
    arguments: tuple[str, ...] = entry(_texts, ())
    settings: Mapping[str, Any] | None = entry(_settings, None)

    @property
    def fixed(self) -> bool:
        """Whether the policy is a fixed map, which ignores the budget."""
        return self.policy in FIXED


def _candidate(body: Any, where: str) -> Candidate:
    found = parse(Candidate, {"policy": body} if isinstance(body, str) else body, where)
    return dataclasses.replace(found, label=found.label or found.policy)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Runs of one kind, ``from_warm`` or ``from_scratch``, of ``steps`` training steps each.

    ``settings`` are SNIP's for all policies. ``save`` keeps the final weights of every run, without optimizer state.
    """

    kind: str
    steps: int = entry(whole(1))
    seeds: tuple[int, ...] = entry(several(whole(), distinct=True))
    granularity: str = entry(one_of(GRANULARITIES), "gemm")
    budgets: tuple[float, ...] = entry(_budgets, ())
    formats: tuple[str, ...] = entry(several(one_of([fmt.value for fmt in Format])), ("fp8", "fp4"))
    updates: Updates = entry(made_of(Updates), _UPDATES)  # noqa: RUF009 - it makes a dataclass field
    settings: Mapping[str, Any] | None = entry(_settings, None)
    candidates: tuple[Candidate, ...] = entry(several(_candidate, indexed=True), name="policies")
    save: bool = entry(flag, False)

    def budgets_of(self, candidate: Candidate) -> tuple[float, ...]:
        """Return the budgets at which ``candidate`` runs: its own, or else those of the phase."""
        return self.budgets if candidate.budgets is None else candidate.budgets


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A comparison of a label with others that the experiment file announces before its runs are made.

    A policy with a fixed map is compared at every budget. ``kind`` is by default the first that the experiment has.
    """

    kind: str = entry(text, "")
    ours: str = entry(text)
    theirs: tuple[str, ...] = entry(_texts)
    budgets: tuple[float, ...] = entry(_budgets)
    validation: str = entry(one_of(VALIDATIONS), "map")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment file. Holm's correction covers the ``planned`` comparisons, and no others.

    ``validation_tokens`` is the minimum number of tokens of a final validation.
    """

    name: str = entry(text_without("/"))
    model: str = entry(text)
    tokenizer: str = entry(one_of(("bytes", "bpe")), "bytes")
    training: Training = entry(made_of(Training))  # noqa: RUF009
    validation_tokens: int = entry(whole(1), 262_144)
    warm: Warm | None = entry(made_of(Warm), None)  # noqa: RUF009
    planned: tuple[Planned, ...] = entry(several(made_of(Planned), indexed=True), ())
    phases: tuple[Phase, ...]

    def schedule(self, kind: str) -> int:
        """Return the steps of a phase's learning rate schedule. The warm run and its branches share one schedule."""
        warm = self.warm.steps if self.warm is not None and kind == "from_warm" else 0
        return warm + sum(phase.steps for phase in self.phases if phase.kind == kind)


def load_experiment(path: Path) -> Experiment:
    """Read an experiment file. Raises SnipError naming the file, the field and the fault."""
    try:
        body = strict.read_object(path.read_bytes())
    except OSError as error:
        raise SnipError(f"{path}: cannot be read ({error})") from None
    except SnipError as error:
        raise SnipError(f"{path}: {error}") from None
    return parse_experiment(body, str(path), path.stem)


def parse_experiment(body: Any, where: str, name: str) -> Experiment:
    """Parse an experiment. ``name`` is its default name. Raises SnipError naming ``where``, the field and the fault."""
    if not isinstance(body, Mapping) or body.get("schema") != SCHEMA:
        raise SnipError(f'{where}: "schema" must be "{SCHEMA}"')
    phases = tuple(
        parse(Phase, body[kind], f"{where}: {kind}", kind=kind) for kind in PHASES if body.get(kind) is not None
    )
    rest = {key: value for key, value in body.items() if key not in ("schema", "comment", *PHASES)}
    if not phases:
        raise SnipError(f"{where}: has neither from_warm nor from_scratch: nothing to train")
    found = parse(Experiment, {**rest, "name": rest.get("name") or name}, where, phases=phases)
    planned = tuple(dataclasses.replace(each, kind=each.kind or phases[0].kind) for each in found.planned)
    experiment = dataclasses.replace(found, planned=planned)
    model(experiment.model)
    for fault in _faults(experiment):
        raise SnipError(f"{where}: {fault}")
    return experiment


def _faults(experiment: Experiment) -> Iterator[str]:
    """Yield fields that do not fit together."""
    training, warm = experiment.training, experiment.warm
    if training.min_lr > training.lr:
        yield f"training: min_lr: {training.min_lr:g} is above lr {training.lr:g}"
    if training.global_batch % training.micro_batch:
        yield f"training: global_batch: {training.global_batch} is no multiple of micro_batch {training.micro_batch}"
    if warm is None and any(phase.kind == "from_warm" for phase in experiment.phases):
        yield "from_warm needs warm: the checkpoint to start from"
    if warm is not None and any(not 0 < step < warm.steps for step in warm.save):
        yield f"warm: save: steps must lie between 0 and {warm.steps}"
    for phase in experiment.phases:
        yield from (f"{phase.kind}: {fault}" for fault in _phase_faults(phase))
        if training.warmup_steps >= (steps := experiment.schedule(phase.kind)):  # Megatron asserts this
            yield f"training.warmup_steps: {training.warmup_steps} must be less than the {steps} steps of {phase.kind}"
    for i, planned in enumerate(experiment.planned):
        yield from (f"planned[{i}]: {fault}" for fault in _planned_faults(planned, experiment.phases))


def _phase_faults(phase: Phase) -> Iterator[str]:
    labels = [candidate.label for candidate in phase.candidates]
    if not labels:
        yield "policies: expected a list of policies"
    if twice := [label for label in labels if labels.count(label) > 1]:
        yield f"policies: {quoted(twice[0])} stands there twice; give one of them a label of its own"
    if not phase.seeds or 0 in phase.seeds:
        yield "seeds: give at least one, all positive (Megatron takes no 0)"
    if phase.updates.first == 0 and phase.kind == "from_scratch":
        yield "updates: first must be at least 1 from scratch: AdamW has no moments before"
    for candidate in phase.candidates:
        if not candidate.fixed and not phase.budgets_of(candidate):
            yield f"budgets: {quoted(candidate.label)} needs at least one"


def _planned_faults(planned: Planned, phases: tuple[Phase, ...]) -> Iterator[str]:
    """Yield policies and budgets of a comparison that the experiment does not run."""
    phase = next((phase for phase in phases if phase.kind == planned.kind), None)
    if phase is None:
        yield f"kind: {quoted(planned.kind)}: expected one of {', '.join(phase.kind for phase in phases)}"
        return
    made = {each.label: each for each in phase.candidates}
    for label in (planned.ours, *planned.theirs):
        if label not in made or (label == planned.ours and made[label].fixed):
            yield f"{quoted(label)} is no policy of {planned.kind} with a budget"
            return
        own = planned.budgets if made[label].fixed else phase.budgets_of(made[label])
        if missing := [budget for budget in planned.budgets if budget not in own]:
            yield f"budgets: {quoted(label)} does not run at {missing[0]:g}"

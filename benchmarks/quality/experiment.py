"""The experiment file of ``compare``. README.md beside this file describes the format."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.quality.models import model
from snip_megatron.precision import Format, strict_json
from snip_megatron.precision.errors import SnipError, located, quoted
from snip_megatron.precision.strict_json import JsonFields
from snip_megatron.sensitivity.policies import FIXED, POLICIES

SCHEMA = "snip.experiment/1"
PHASES = ("from_warm", "from_scratch")
VALIDATIONS = ("map", "bf16")
"""Formats in which a run is validated."""
TOKENIZERS = ("bytes", "bpe")
_MOST_BYTES = 200  # of a name or a label
_LEAST = dict.fromkeys(("sequence", "global_batch", "micro_batch", "ranks", "steps", "seed", "lag"), 1) | {
    "validation_tokens": 1,
    "interval": 2,
}
_MOST = {"budgets": 1}


@dataclass(frozen=True, kw_only=True)
class Training(JsonFields):
    """The training settings of all runs: AdamW with linear warm-up and cosine decay over all steps.

    Each run has ``ranks`` ranks, on as many GPUs; ``arguments``, further ones for Megatron, have their layout.
    """

    sequence: int
    global_batch: int
    micro_batch: int
    lr: float
    min_lr: float = 0.0
    warmup_steps: int = 0
    arguments: tuple[str, ...] = ()
    ranks: int = 1


@dataclass(frozen=True)
class Warm(JsonFields):
    """The bf16 run from whose checkpoint all branches start; at the steps ``save`` it keeps earlier checkpoints."""

    steps: int
    seed: int = 1234
    save: tuple[int, ...] = ()


@dataclass(frozen=True)
class Updates(JsonFields):
    """The update schedule of a run in steps, of which ``first`` counts from the run's start.

    For ``wait`` seconds training waits for the solver, so that schedules are repeatable.
    """

    first: int = 1
    interval: int = 1_000_000
    lag: int = 1
    wait: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Candidate(JsonFields):
    """A policy and its settings. ``label`` names it in tables. What is None is the phase's or SNIP's default."""

    policy: str
    label: str
    granularity: str | None = None
    budgets: tuple[float, ...] | None = None
    arguments: tuple[str, ...] = ()
    settings: Mapping[str, Any] | None = None

    @property
    def fixed(self) -> bool:
        return self.policy in FIXED

    @classmethod
    def from_dict(cls, body: Any, where: str) -> Self:
        """Read an object, or the name of a policy, which is also the default of its label."""
        fields = {"policy": body} if isinstance(body, str) else strict_json.mapping(body, where)
        return super().from_dict({"label": fields.get("policy"), **fields}, where)


@dataclass(frozen=True, kw_only=True)
class Phase(JsonFields):
    """Runs of one kind, ``from_warm`` or ``from_scratch``, of ``steps`` training steps each.

    ``save`` keeps the final weights of every run, without optimizer state if the phase is ``from_scratch``.
    """

    kind: str
    steps: int
    seeds: tuple[int, ...]
    granularity: str = "gemm"
    budgets: tuple[float, ...] = ()
    formats: tuple[str, ...] = ("fp8", "fp4")
    updates: Updates = Updates()
    candidates: tuple[Candidate, ...] = ()
    save: bool = False

    def budgets_of(self, candidate: Candidate) -> tuple[float, ...]:
        """Return the budgets at which ``candidate`` runs: its own, or else those of the phase."""
        return self.budgets if candidate.budgets is None else candidate.budgets


@dataclass(frozen=True, kw_only=True)
class Planned(JsonFields):
    """A comparison of a label with others that the experiment file announces before its runs are made.

    A policy with a fixed map is compared at every budget. ``kind`` is by default the first that the experiment has.
    """

    kind: str
    ours: str
    theirs: tuple[str, ...]
    budgets: tuple[float, ...]
    validation: str = "map"


@dataclass(frozen=True, kw_only=True)
class Experiment(JsonFields):
    """An experiment file. Holm's correction covers the ``planned`` comparisons, and no others.

    ``validation_tokens`` is the minimum number of tokens of a final validation.
    """

    name: str
    model: str
    tokenizer: str = "bytes"
    training: Training
    validation_tokens: int = 262_144
    warm: Warm | None = None
    planned: tuple[Planned, ...] = ()
    phases: tuple[Phase, ...] = ()

    def schedule(self, kind: str) -> int:
        """Return the steps of a phase's learning rate schedule. The warm run and its branches share one schedule."""
        warm = self.warm.steps if self.warm is not None and kind == "from_warm" else 0
        return warm + sum(phase.steps for phase in self.phases if phase.kind == kind)


def load_experiment(path: Path) -> Experiment:
    """Read an experiment file. Raises SnipError naming the file, the field and the fault."""
    content = strict_json.read_file(path)
    with located(str(path)):
        body = strict_json.read_object(content)
    return parse_experiment(body, str(path), path.stem)


def parse_experiment(body: Any, where: str, name: str) -> Experiment:
    """Parse an experiment. ``name`` is its default name. Raises SnipError naming ``where``, the field and the fault."""
    if not isinstance(body, Mapping) or body.get("schema") != SCHEMA:
        raise SnipError(f'{where}: "schema" must be "{SCHEMA}"')
    phases = tuple(_phase(body[kind], f"{where}: {kind}", kind) for kind in PHASES if body.get(kind) is not None)
    if not phases or "phases" in body:
        raise SnipError(f"{where}: the runs to train stand under from_warm, from_scratch or both")
    fields = {key: value for key, value in body.items() if key not in ("schema", "comment", *PHASES)}
    planned = fields.get("planned", ())
    planned = [{"kind": phases[0].kind, **each} if isinstance(each, dict) else each for each in planned]
    settings = Experiment.from_dict({"name": name, **fields, "planned": planned}, f"{where}: experiment")
    experiment = dataclasses.replace(settings, phases=phases)
    model(experiment.model)
    for fault in _faults(experiment):
        raise SnipError(f"{where}: {fault}")
    return experiment


def _phase(body: Any, where: str, kind: str) -> Phase:
    fields = dict(strict_json.mapping(body, where))
    policies = strict_json.array(fields.pop("policies", []), f"{where}.policies")
    candidates = tuple(Candidate.from_dict(each, f"{where}.policies[{i}]") for i, each in enumerate(policies))
    return dataclasses.replace(Phase.from_dict({**fields, "kind": kind}, where), candidates=candidates)


def _faults(experiment: Experiment) -> Iterator[str]:
    """Yield fields that are out of range, or do not fit together."""
    training, warm = experiment.training, experiment.warm
    yield from _out_of_range(dataclasses.replace(experiment, phases=()), "")
    labels = [candidate.label for phase in experiment.phases for candidate in phase.candidates]
    for text, refused in ((experiment.name, "/"), *((label, "|") for label in labels)):
        if not text or not text.isprintable() or refused in text or len(text.encode()) > _MOST_BYTES:
            yield f"{quoted(text)}: must be 1 to {_MOST_BYTES} printable characters, without {refused}"
    if experiment.tokenizer not in TOKENIZERS:
        yield f"tokenizer: {quoted(experiment.tokenizer)} is unknown; choose one of {', '.join(TOKENIZERS)}"
    if training.min_lr > training.lr:
        yield f"training.min_lr: {training.min_lr:g} is above lr {training.lr:g}"
    if training.global_batch % training.micro_batch:
        yield f"training.global_batch: {training.global_batch} is no multiple of micro_batch {training.micro_batch}"
    if warm is None and any(phase.kind == "from_warm" for phase in experiment.phases):
        yield "from_warm needs warm: the checkpoint to start from"
    if warm is not None and not all(0 < step < warm.steps for step in warm.save):
        yield f"warm.save: steps must lie between 0 and {warm.steps}"
    for phase in experiment.phases:
        yield from (f"{phase.kind}.{fault}" for fault in _phase_faults(phase))
        if training.warmup_steps >= (steps := experiment.schedule(phase.kind)):  # Megatron asserts this
            yield f"training.warmup_steps: {training.warmup_steps} must be less than the {steps} steps of {phase.kind}"
    for i, planned in enumerate(experiment.planned):
        yield from (f"planned[{i}]: {fault}" for fault in _planned_faults(planned, experiment.phases))


def _out_of_range(part: JsonFields, path: str) -> Iterator[str]:
    """Yield numbers out of their range, by the names of their fields."""
    for name, value in vars(part).items():
        least, most = _LEAST.get(name, 0), _MOST.get(name, 2**63 - 1)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, JsonFields):
                yield from _out_of_range(each, f"{path}{name}.")
            elif isinstance(each, (int, float)) and not least <= each <= most:
                yield f"{path}{name}: {each:g} is not from {least} to {most:g}"


def _phase_faults(phase: Phase) -> Iterator[str]:
    yield from _out_of_range(phase, "")
    labels = [candidate.label for candidate in phase.candidates]
    if not labels:
        yield "policies: expected a list of policies"
    if twice := [label for label in labels if labels.count(label) > 1]:
        yield f"policies: {quoted(twice[0])} stands there twice; give one of them a label of its own"
    if not phase.seeds or 0 in phase.seeds or len(set(phase.seeds)) < len(phase.seeds):
        yield "seeds: give at least one, all positive (Megatron takes no 0), and none twice"
    if unknown := sorted(set(phase.formats) - set(Format)):
        yield f"formats: {quoted(unknown[0])} is unknown; choose among {', '.join(Format)}"
    if phase.updates.first == 0 and phase.kind == "from_scratch":
        yield "updates: first must be at least 1 from scratch: AdamW has no moments before"
    for i, candidate in enumerate(phase.candidates):
        if candidate.policy not in POLICIES:
            yield f"policies[{i}].policy: {quoted(candidate.policy)} is unknown; choose one of {', '.join(POLICIES)}"
        if not candidate.fixed and not phase.budgets_of(candidate):
            yield f"budgets: {quoted(candidate.label)} needs at least one"


def _planned_faults(planned: Planned, phases: tuple[Phase, ...]) -> Iterator[str]:
    """Yield policies and budgets of a comparison that the experiment does not run."""
    phase = next((phase for phase in phases if phase.kind == planned.kind), None)
    if phase is None:
        yield f"kind: {quoted(planned.kind)}: expected one of {', '.join(phase.kind for phase in phases)}"
        return
    if planned.validation not in VALIDATIONS:
        yield f"validation: {quoted(planned.validation)}: expected one of {', '.join(VALIDATIONS)}"
    by_label = {each.label: each for each in phase.candidates}
    for label in (planned.ours, *planned.theirs):
        if label not in by_label or (label == planned.ours and by_label[label].fixed):
            yield f"{quoted(label)} is no policy of {planned.kind} with a budget"
            return
        budgets = planned.budgets if by_label[label].fixed else phase.budgets_of(by_label[label])
        if missing := [budget for budget in planned.budgets if budget not in budgets]:
            yield f"budgets: {quoted(label)} does not run at {missing[0]:g}"

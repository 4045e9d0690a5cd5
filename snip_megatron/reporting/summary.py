"""The summary of a run: what its maps saved and cost in time, predicted loss and memory, and whether it was worth it.

Only :func:`summarise` computes these figures. The end of a run, the report and ``snip report --json`` show them. The
running job has the same times (:mod:`snip_megatron.runtime.account`).
"""

import contextlib
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from snip_megatron.numerics.products import EMULATIONS
from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.errors import SnipError
from snip_megatron.reporting.phases import RunPhase, differences, remaining_phases
from snip_megatron.reporting.stage_view import Prediction
from snip_megatron.runtime.account import STEPS, TOLERANCE, Account, Stretch, is_quantised
from snip_megatron.runtime.defaults import in_nats
from snip_megatron.runtime.run_data import Adoption, RunData, number

SCHEMA = "snip.worth/1"
TRUE_OVER_PREDICTED = (0.95, 1.45)
"""True change of the loss over the predicted one, for all fprops of small models (docs/results.md)."""
_SLOPE_LOSSES = 200  # a slope is fitted to no fewer losses
_CERTAIN = 4.0  # standard errors that make a fall of the loss one
_OF_STRETCH = ("begin", "end", "version", "quantised", "step_s", "bf16_s", "speedup", "mean_s", "predicted")


@dataclass(frozen=True)
class LossCost:
    """The loss that the current map costs, as predicted from the statistics of its update.

    Attributes:
        nats: predicted rise of the loss over bf16 at equal weights, while the map is in force.
        at_end: with phases, the rise that the plan is predicted to leave when training ends; None without phases.
        bound: the budget ``loss=``, which bounds ``at_end`` with phases and ``nats`` without; None under another one.
        low, high: range of the true rise, from the ratios that were measured on small models.
        backward: whether the formats of dgrad and wgrad are included.
        measured: validation loss in the map's formats minus that in bf16, if the run validated in both.
        steps: training steps by which the loss falls by ``nats`` at present; None if noise hides its fall.
    """

    version: int | None
    nats: float
    low: float
    high: float
    backward: bool
    measured: float | None
    steps: float | None
    at_end: float | None = None
    bound: float | None = None


@dataclass(frozen=True)
class Memory:
    """Peak memory of rank 0 in bytes, so far and before the first update (None: unknown); ``resident``: the host's."""

    peak: int
    before: int | None
    resident: bool


@dataclass(frozen=True)
class RunSummary:
    """The judgement of a run. Times are rank 0's, in seconds; None if they are not known.

    Attributes:
        verdict: ``yes``, ``no``, ``too early``, ``not judged`` or ``no map``.
        why: why speed is not judged, or not yet; empty otherwise.
        warnings: what to change, if it was not worth it.
        bf16_s, bf16_steps: median time of a step in bf16, and the number of steps of this median.
        maps: steps under each map.
        saved_s: time saved so far, minus all costs.
        saved_run_s: the same at the end of the run, under the assumption ``assumes``, which is half a sentence: that
            the current map stays, or that the plan of a run with phases is followed.
        costs: seconds by kind of event.
        loss, memory: None if it cannot be predicted, or was not recorded.
        tokens_s: tokens a second of the usual steps under the latest map that has a median.
        over_fp8, fp8: predicted speedup of a step under the map in force over one with all linears in ``fp8``, the
            fastest 8-bit format.
    """

    verdict: str
    why: str
    warnings: tuple[str, ...]
    steps: int
    total_steps: int | None
    bf16_s: float | None
    bf16_steps: int
    maps: tuple[Stretch, ...]
    saved_s: float | None
    saved_run_s: float | None
    updates: int
    costs: Mapping[str, float]
    loss: LossCost | None
    memory: Memory | None
    assumes: str = ""
    tokens_s: float | None = None
    over_fp8: float | None = None
    fp8: str = ""

    @property
    def cost_s(self) -> float:
        return math.fsum(self.costs.values())

    @property
    def cost_share(self) -> float | None:
        """All costs as a share of the time, costs included; None without times of steps.

        Steps under a map that was too short for a median count with the mean of the others.
        """
        timed = [(m.steps, m.steps * m.step_s) for m in self.maps if m.step_s]
        if not timed:
            return None
        steps, seconds = map(sum, zip(*timed, strict=True))
        trained = seconds / steps * sum(each.steps for each in self.maps)
        return self.cost_s / (trained + self.cost_s)

    @property
    def update_s(self) -> float:
        """Mean cost of an update. What was compiled before the first step counts once for all of them."""
        return (self.cost_s - self.costs.get("compile", 0.0)) / self.updates if self.updates else 0.0

    @property
    def judged(self) -> Stretch | None:
        """The latest map whose speed is known."""
        known = [each for each in self.maps if each.quantised and each.speedup is not None]
        return known[-1] if known else None

    def as_dict(self) -> dict[str, Any]:
        """Return the object of a ``snip.worth/1`` file."""
        maps = [
            {name: getattr(each, name) for name in _OF_STRETCH} | {"predicted_of": each.predicted_of or None}
            for each in self.maps
        ]
        return {"schema": SCHEMA, **asdict(self), "maps": maps, "cost_s": self.cost_s}


def summarise(run: RunData) -> RunSummary:
    """Compute the figures of a run from its records."""
    account = Account()
    account.read(run.events, run.metrics, {a.step: a.precision_map for a in run.adoptions})
    prediction: Prediction | None = None
    with contextlib.suppress(SnipError):  # figures of another version: nothing is predicted
        prediction = Prediction.stored(run)
    by_step = {adoption.step: adoption for adoption in run.adoptions}
    maps = account.stretches()
    for stretch in maps:
        stretch.predicted, stretch.predicted_of = _predicted(prediction, stretch, by_step.get(stretch.begin))
    steps = int(run.metrics[-1]["step"]) + 1 if run.metrics else 0
    wanted = number(run.facts.get("train_iters"))
    found = RunSummary(
        verdict="",
        why=_why_not(run),
        warnings=(),
        steps=steps,
        total_steps=None if wanted is None else max(int(wanted), steps),
        bf16_s=account.bf16_s,
        bf16_steps=account.bf16_steps,
        maps=tuple(maps),
        saved_s=account.saved_s(),
        saved_run_s=None,
        updates=account.updates,
        costs={kind: seconds for kind, seconds in account.costs.items() if seconds},
        loss=_loss_cost(run),
        memory=_memory(run),
        tokens_s=_tokens_per_second(run, maps),
    )
    last = run.adoptions[-1].precision_map if run.adoptions else None
    over = None if prediction is None or last is None else prediction.over_fp8(last, account.latest_bf16_s)
    if over is not None:
        found = replace(found, fp8=over[0].value, over_fp8=over[1])
    if found.why:  # speeds without a meaning must not be read as some
        bare = tuple(replace(each, bf16=deque()) for each in found.maps)
        found = replace(found, maps=bare, saved_s=None)
    else:
        saved_run_s, assumes = _saved_over_run(found, run, prediction)
        found = replace(found, saved_run_s=saved_run_s, assumes=assumes)
    return _with_verdict(found)


# -- time ----------------------------------------------------------------------------------------------------------
def _why_not(run: RunData) -> str:
    """Return why the speed of a run cannot be judged; an empty text if it can."""
    if not any("step_s" in row for row in run.metrics):
        return "times of steps are not recorded"
    if run.facts.get("gemm_backend") in EMULATIONS:
        return f"formats are emulated on {run.facts.get('device', 'this device')}, which saves no time"
    return "the batch size ramps up, and steps with it" if run.facts.get("batch_size_ramps") else ""


def _saved_over_run(found: RunSummary, run: RunData, prediction: Prediction | None) -> tuple[float | None, str]:
    """Return the time saved when training ends, if updates cost what they did so far, and what else that assumes."""
    now = found.maps[-1] if found.maps else None
    if found.saved_s is None or found.total_steps is None or now is None or now.speedup is None:
        return None, ""
    left = found.total_steps - found.steps
    each = now.bf16_s - now.step_s if now.quantised and now.bf16_s is not None and now.step_s is not None else 0.0
    saved, assumes = left * each, "this map stays"
    ahead = remaining_phases(run)
    current = run.adoptions[-1].precision_map if run.adoptions else None
    if any(differences(current, phase.precision_map) for phase in ahead):
        by_plan = _saved_by_plan(found.maps[-1], each, ahead, prediction)
        assumes = "this map stays, although the plan changes it"
        if by_plan is not None and sum(phase.steps for phase in ahead) == left:
            saved, assumes = by_plan, "the plan is followed"
    return found.saved_s + saved - _updates_to_come(left, run.config) * found.update_s, assumes


def _saved_by_plan(now: Stretch, each: float, ahead: Sequence[RunPhase], prediction: Prediction | None) -> float | None:
    """Return the seconds that the phases to come save: what a step saves now, times the ratio that is predicted.

    None if a prediction is missing, or if nothing is saved now, so that there is nothing to scale.
    """
    speedups = [_speedup_of(prediction, phase.precision_map, now.predicted_of) or 0.0 for phase in ahead]
    if min(speedups) <= 0.0 or each <= 0 or now.predicted is None or now.predicted <= 1.0:
        return None
    scale = each / (1.0 - 1.0 / now.predicted)
    return math.fsum(p.steps * scale * (1.0 - 1.0 / speedup) for p, speedup in zip(ahead, speedups, strict=True))


def _tokens_per_second(run: RunData, maps: Sequence[Stretch]) -> float | None:
    batch, length = number(run.facts.get("global_batch_size")), number(run.config.get("seq_length"))
    step = next((m.step_s for m in reversed(maps) if m.step_s), None)
    return None if batch is None or length is None or step is None else batch * length / step


def _updates_to_come(left: int, config: Mapping[str, Any]) -> int:
    interval = number(config.get("update_interval"))
    policy = str(config.get("policy"))
    fixed = config.get("map") or config.get("replay") or policy.startswith(("uniform", "bf16", "late-"))
    return 0 if not interval or fixed else left // max(1, int(interval))


def _predicted(prediction: Prediction | None, stretch: Stretch, adoption: Adoption | None) -> tuple[float | None, str]:
    """Return the speedup that was predicted for a stretch, and of what: the whole ``step`` or the ``linears``."""
    if adoption is None or not stretch.quantised:
        return None, ""
    step = number(adoption.fields.get("step_speedup"))
    if step is None and adoption.precision_map is not None:
        step = _speedup_of(prediction, adoption.precision_map, "step")
    if step is not None:
        return step, "step"
    return (None, "") if adoption.speedup is None else (adoption.speedup, "linears")


def _speedup_of(prediction: Prediction | None, precision_map: PrecisionMap, of: str) -> float | None:
    """Return the predicted speedup of the whole ``step`` or of the ``linears`` under a map; None if unknown."""
    if of != "step" or prediction is None:
        return precision_map.step_speedup if of == "step" else precision_map.speedup if of == "linears" else None
    return prediction.step_speedup(precision_map)


# -- loss and memory -----------------------------------------------------------------------------------------------
def _loss_cost(run: RunData) -> LossCost | None:
    """Return the predicted loss of the map in force; None if there is none, or it was not chosen from statistics."""
    last = run.adoptions[-1] if run.adoptions else None
    if last is None or last.precision_map is None or not is_quantised(last.precision_map) or not last.scores:
        return None
    policy = str(run.config.get("policy"))
    backward = policy == "snip" and in_nats(policy, str(run.config.get("q")))
    nats = _sum_of_scores(last.precision_map, last.scores, "q" if backward else "delta_loss")
    if nats <= 0:
        return None
    low, high = (factor * nats for factor in TRUE_OVER_PREDICTED)
    slope = _slope(run)
    steps = None if slope is None else nats / slope
    plans = [plan for step, plan in run.plans.items() if step <= last.step and plan.version == last.version]
    at_end = None
    if plans and backward:  # what a plan minimises under loss= is time; the objective of each of its maps is loss
        at_end = math.fsum(phase.precision_map.objective or 0.0 for phase in plans[-1].phases)
    budget = run.budget
    bound = budget.value if budget is not None and budget.kind == "loss" else None
    return LossCost(last.version, nats, low, high, backward, _validated(run, last.step), steps, at_end, bound)


def _sum_of_scores(precision_map: PrecisionMap, scores: Mapping[str, Any], name: str) -> float:
    by_option = [(scores.get(option), fmt.value) for option, fmt in precision_map.choices.items()]
    chosen = [by_format.get(fmt) for by_format, fmt in by_option if isinstance(by_format, Mapping)]
    return math.fsum(number(score.get(name)) or 0.0 for score in chosen if isinstance(score, Mapping))


def _validated(run: RunData, since: int) -> float | None:
    """Return the latest validation loss in the map's formats less that in bf16, of the same step after ``since``."""
    validations = run.validations()
    own, bf16 = (validations.get(formats, {}) for formats in ("map", "bf16"))
    last = max(own.keys() | bf16.keys(), default=since)
    return own[last] - bf16[last] if last > since and last in own and last in bf16 else None


def _slope(run: RunData) -> float | None:
    """Return by how much the loss falls in a step, over the last fifth of the steps; None if noise hides it."""
    losses = [value for value in run.series("loss")[1] if value is not None]
    half = len(losses) // 10
    if 2 * half < _SLOPE_LOSSES:
        return None
    first, second = losses[-2 * half : -half], losses[-half:]
    fall = float(np.mean(first) - np.mean(second))
    error = math.sqrt((np.var(first, ddof=1) + np.var(second, ddof=1)) / half)
    return fall / half if fall > _CERTAIN * error else None


def _memory(run: RunData) -> Memory | None:
    peaks = [(row["step"], int(peak)) for row in run.metrics if (peak := number(row.get("peak_bytes"))) is not None]
    if not peaks:
        return None
    first = min((event["step"] for event in run.events if event["event"] in ("probe", "dropped")), default=None)
    before = [peak for step, peak in peaks if first is not None and step < first]
    return Memory(max(peak for _, peak in peaks), max(before, default=None), run.facts.get("device", "cpu") == "cpu")


# -- verdict -------------------------------------------------------------------------------------------------------
def _with_verdict(found: RunSummary) -> RunSummary:
    if not any(each.quantised for each in found.maps):
        return replace(found, verdict="no map", why=found.why or "every step so far was in bf16")
    if found.why:
        return replace(found, verdict="not judged")
    if found.judged is None or found.saved_s is None:
        if found.bf16_s is None:
            why = (
                f"usual steps in bf16 to compare with are {found.bf16_steps}, {STEPS} are needed: use a later"
                " --snip-first-update"
            )
            return replace(found, verdict="not judged", why=why)
        return replace(found, verdict="too early", why=f"fewer than {STEPS} usual steps ran under a map")
    no, hint = _fault(found, found.judged), _hint(found.judged)
    return replace(found, verdict="yes" if no is None else "no", warnings=tuple(w for w in (no, hint) if w))


def _fault(found: RunSummary, judged: Stretch) -> str | None:
    """Return why it was not worth it, with a remedy; None if it was."""
    speedup = judged.speedup or 0.0
    total = found.saved_s if found.saved_run_s is None else found.saved_run_s
    if speedup < TOLERANCE:
        return (
            f"steps under map {judged.version} are not faster than in bf16 ({speedup:.2f} x): if the GPU waits"
            " for its host, larger microbatches or fewer tensor parallel ranks help; else ask for what pays:"
            " --snip without a budget, snip plan"
        )
    if total is not None and total <= 0:
        each = (judged.bf16_s or 0.0) - (judged.step_s or 0.0)
        return (
            f"updates cost more than the maps save: one pays for itself after {math.ceil(found.update_s / each):,}"
            " steps; use a longer --snip-update-interval, or --snip-estimator fisher"
        )
    lost = None if found.loss is None or found.loss.steps is None else found.loss.steps * (found.bf16_s or 0.0)
    if lost is not None and total is not None and lost > total:
        return (
            "the predicted rise of the loss costs more training time than was saved: ask for less, with a smaller"
            " --snip-budget or with --snip-budget loss=NATS"
        )
    return None


def _hint(judged: Stretch) -> str | None:
    """Return what could be better, although it was worth it."""
    speedup = judged.speedup or 0.0
    predicted = judged.predicted if judged.predicted_of == "step" else None
    if predicted is None or predicted <= TOLERANCE or speedup - 1.0 >= 0.5 * (predicted - 1.0):
        return None
    return (
        f"less than half of the predicted gain was measured ({speedup:.2f} x, predicted {predicted:.2f} x): measure"
        " this GPU with snip calibrate and give --snip-timings FILE"
    )

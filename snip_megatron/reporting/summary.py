"""The summary of a run: what its maps saved and cost in time, predicted loss and memory, and whether it was worth it.

:func:`summarise` computes the figures. :func:`headline`, :func:`sentences` and :func:`lines` turn them into text. The
end of a run, the report and ``snip report --json`` show them. A running job computes the same times
(:mod:`snip_megatron.runtime.account`).
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from snip_megatron.numerics.products import EMULATIONS
from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.account import STEPS, TOLERANCE, Account, Stretch, duration
from snip_megatron.runtime.run_data import Adoption, RunData, number
from snip_megatron.sensitivity.policies import in_nats
from snip_megatron.sensitivity.times import OptionTimes

SCHEMA = "snip.worth/1"
TRUE_OVER_PREDICTED = (0.95, 1.45)
"""Range of the true rise of the loss over the predicted one, for all fprops of small models (docs/results.md)."""
_MIN_SLOPE_LOSSES = 200  # minimum number of losses for a slope
_MIN_SLOPE_ERRORS = 4.0  # minimum of a slope in its standard errors; a smaller one is noise
_STRETCH_FIELDS = ("begin", "end", "version", "quantised", "step_s", "bf16_s", "speedup", "mean_s", "predicted")

_COST_NAMES = {
    "compile": "compiling at start",
    "probe": "probes",
    "collect": "reduction of statistics",
    "times": "timing of GEMMs",
    "submit": "submission",
    "dropped": "dropped updates",
    "postpone": "waiting for the solver",
    "kept": "waiting for failed solves",
    "guard": "refused maps",
    "rise": "measuring maps",
    "adopt": "adoption",
    "settled": "slower steps afterwards",
    "recapture": "capturing graphs again",
}


@dataclass(frozen=True)
class LossCost:
    """The loss that the current map costs, as predicted from its update's statistics. None means: not known."""

    version: int | None
    nats: float  # predicted rise of the loss over bf16 at equal weights, while the map is in force
    low: float  # range of the true rise, from the ratios that were measured on small models
    high: float
    backward: bool  # whether the formats of dgrad and wgrad are included
    measured: float | None  # validation loss in the map's formats minus that in bf16, of a run that validates in both
    steps: float | None  # training steps in which the loss falls by ``nats`` at present. None if noise hides its fall
    at_end: float | None = None  # with phases, the rise that the plan is predicted to leave when training ends
    bound: float | None = None  # the budget ``loss=``, which bounds ``at_end`` with phases and ``nats`` without
    bf16_loss: float | None = None  # that of the last validation in bf16, or the run's present loss without ``nats``
    rise: float | None = None  # as measured before the map was adopted
    rise_error: float | None = None  # standard error of ``rise``

    @property
    def share(self) -> str:
        """``nats`` as a part of the loss in bf16, as text. Empty if that loss is unknown."""
        return f"{100 * self.nats / self.bf16_loss:.2g} % of this run's bf16 loss" if self.bf16_loss else ""


@dataclass(frozen=True)
class Memory:
    """Peak memory of rank 0 in bytes."""

    peak: int
    before: int | None  # before the first update. None if it is not known
    resident: bool  # whether the memory is that of the host, not of the GPU


@dataclass(kw_only=True)
class RunSummary:
    """The figures of a run and their verdict. Times are those of rank 0, in seconds. None means: not known."""

    verdict: str = ""  # ``yes``, ``no``, ``in longer runs``, ``too early``, ``not judged`` or ``no map``
    why: str  # the reason if speed is not judged, or not yet. Otherwise empty
    warnings: tuple[str, ...] = ()  # what to change, if it was not worth it
    steps: int
    total_steps: int | None
    # bf16_s, bf16_steps: median time of a step in bf16, and the number of steps of this median
    bf16_s: float | None
    bf16_steps: int
    maps: tuple[Stretch, ...]  # the steps under each map
    saved_s: float | None  # time saved so far, minus all costs
    saved_run_s: float | None = None  # the same at the end of the run, if the current map stays
    updates: int
    costs: Mapping[str, float]  # seconds by kind of event
    loss: LossCost | None  # None if it cannot be predicted
    memory: Memory | None  # None if it was not recorded
    tokens_s: float | None  # tokens a second of the usual steps under the latest map that has a median
    # over_fp8, fp8: predicted speedup of a step under the map in force over one with all linears in ``fp8``, the
    # fastest 8-bit format
    over_fp8: float | None = None
    fp8: str = ""
    lost: Mapping[str, int]  # number of records that were never written, by kind
    gpus: int  # number of GPUs. 0 on a CPU

    @property
    def gpu_hours_saved(self) -> float | None:
        """GPU hours saved so far, minus all costs. None on a CPU, or if the time saved is not known."""
        return self.saved_s * self.gpus / 3600 if self.saved_s is not None and self.gpus else None

    @property
    def cost_s(self) -> float:
        return math.fsum(self.costs.values())

    @property
    def cost_share(self) -> float | None:
        """All costs as a share of the time, costs included. None if the times of steps are not known.

        A map that was in force for too few steps has no median. Its steps count with the mean of the others.
        """
        timed = [(m.steps, m.steps * m.step_s) for m in self.maps if m.step_s]
        if not timed:
            return None
        steps, seconds = map(sum, zip(*timed, strict=True))
        trained = seconds / steps * sum(stretch.steps for stretch in self.maps)
        return self.cost_s / (trained + self.cost_s)

    @property
    def update_s(self) -> float:
        """Mean cost of an update, without the compilation before the first step, which no update repeats."""
        return (self.cost_s - self.costs.get("compile", 0.0)) / self.updates if self.updates else 0.0

    @property
    def steps_to_pay(self) -> int | None:
        """Number of steps under the latest map in which an update pays for itself. None if they save nothing."""
        saving = (self.judged and self.judged.step_saving) or 0.0
        return math.ceil(self.update_s / saving) if self.updates and saving > 0 else None

    @property
    def judged(self) -> Stretch | None:
        """The latest map whose speed is known."""
        timed = [stretch for stretch in self.maps if stretch.quantised and stretch.speedup is not None]
        return timed[-1] if timed else None

    def as_dict(self) -> dict[str, Any]:
        """Return the object of a ``snip.worth/1`` file."""
        maps = [
            {name: getattr(stretch, name) for name in _STRETCH_FIELDS} | {"predicted_of": stretch.predicted_of or None}
            for stretch in self.maps
        ]
        return {"schema": SCHEMA, **asdict(self), "maps": maps, "cost_s": self.cost_s}


@dataclass(frozen=True)
class Prediction:
    """The predicted times of a run's linears, and the pipeline stage of each linear by name."""

    times: OptionTimes
    stages: Mapping[str, int]

    @classmethod
    def load(cls, run: RunData) -> Prediction | None:
        """Load the times that a run stored. Returns None if it stored none. Raises SnipError if they are invalid."""
        request, stages = run.facts.get("request"), run.facts.get("linear_stages")
        body = (request.get("times") if isinstance(request, Mapping) else None) or run.facts.get("predicted_times")
        if body is None:
            return None
        return cls(OptionTimes.from_dict(body, "config.json: facts"), stages if isinstance(stages, Mapping) else {})

    def step_speedup(self, precision_map: PrecisionMap) -> float | None:
        """Return the predicted speedup of the whole step under a map. None if it is not known."""
        return precision_map.step_speedup or self._speedup(precision_map, None)

    def over_fp8(self, precision_map: PrecisionMap, bf16_s: float | None) -> tuple[Format, float] | None:
        """Compare a step under a map with one that has all linears in the fastest 8-bit format.

        Returns this format and the ratio of the two speedups, or None if a prediction is missing. Both speedups are
        over the same step in bf16: the measured one of ``bf16_s`` seconds, or the predicted one if that is None.
        """
        speedup, names = self._speedup(precision_map, bf16_s), [str(linear) for linear in precision_map.linears()]
        formats = (Format.FP8_TENSOR, Format.FP8, Format.MXFP8)
        uniform = {fmt: self._speedup(PrecisionMap.uniform(names, fmt), bf16_s) for fmt in formats}
        speedups = {fmt: value for fmt, value in uniform.items() if value is not None}
        if speedup is None or not speedups:
            return None
        fastest = max(speedups, key=lambda fmt: speedups[fmt])
        return fastest, speedup / speedups[fastest]

    def _speedup(self, precision_map: PrecisionMap, bf16_s: float | None) -> float | None:
        try:
            stages = {name: int(self.stages[name]) for name in map(str, precision_map.linears())}
            return self.times.step_speedup(precision_map, stages, bf16_s)
        except (SnipError, KeyError, TypeError, ValueError):  # a format without a time, a linear without a stage
            return None


def summarise(run: RunData) -> RunSummary:
    """Compute the figures of a run from its records."""
    account = Account()
    account.read(run.events, run.metrics)
    prediction: Prediction | None = None
    with contextlib.suppress(SnipError):  # times of another version are invalid
        prediction = Prediction.load(run)
    by_step = {adoption.step: adoption for adoption in run.adoptions}
    maps = account.stretches()
    for stretch in maps:
        stretch.predicted, stretch.predicted_of = _stretch_prediction(prediction, stretch, by_step.get(stretch.begin))
    steps = int(run.metrics[-1]["step"]) + 1 if run.metrics else 0
    train_iters = number(run.facts.get("train_iters"))
    batch, length = number(run.facts.get("global_batch_size")), number(run.config.get("seq_length"))
    step_s = next((stretch.step_s for stretch in reversed(maps) if stretch.step_s), None)
    summary = RunSummary(
        why=_why_not_judged(run),
        steps=steps,
        total_steps=None if train_iters is None else max(int(train_iters), steps),
        bf16_s=account.bf16_s,
        bf16_steps=account.bf16_steps,
        maps=tuple(maps),
        saved_s=account.saved_s(),
        updates=account.updates,
        costs={kind: seconds for kind, seconds in account.costs.items() if seconds},
        loss=_loss_cost(run),
        memory=_memory(run),
        tokens_s=None if batch is None or length is None or step_s is None else batch * length / step_s,
        lost=run.lost,
        gpus=0 if run.facts.get("device", "cpu") == "cpu" else int(number(run.facts.get("world_size")) or 1),
    )
    last = run.adoptions[-1].precision_map if run.adoptions else None
    over = None if prediction is None or last is None else prediction.over_fp8(last, account.latest_bf16_s)
    if over is not None:
        summary.fp8, summary.over_fp8 = over[0].value, over[1]
    if summary.why:  # without times in bf16, no stretch has a speedup that a reader could take for a result
        summary.maps, summary.saved_s = tuple(replace(stretch, bf16=deque()) for stretch in maps), None
    else:
        summary.saved_run_s = _saved_over_run(summary, run.config)
    summary.verdict, summary.why, warnings = _verdict(summary, run)
    summary.warnings = tuple(warning for warning in warnings if warning)
    return summary


# -- time ----------------------------------------------------------------------------------------------------------
def _why_not_judged(run: RunData) -> str:
    """Return why the speed of a run cannot be judged. Empty if it can."""
    if not any("step_s" in row for row in run.metrics):
        return "times of steps are not recorded"
    if run.facts.get("gemm_backend") in EMULATIONS:
        return f"formats are emulated on {run.facts.get('device', 'this device')}, which saves no time"
    return "the batch size ramps up, and steps with it" if run.facts.get("batch_size_ramps") else ""


def _saved_over_run(summary: RunSummary, config: Mapping[str, Any]) -> float | None:
    """Return the time saved at the end of the run, if the current map stays and updates cost what they have cost."""
    last = summary.maps[-1] if summary.maps else None
    if summary.saved_s is None or summary.total_steps is None or last is None or last.speedup is None:
        return None
    steps, interval = summary.total_steps - summary.steps, number(config.get("update_interval"))
    policy = str(config.get("policy"))
    fixed = config.get("map") or config.get("replay") or policy.startswith(("uniform", "bf16", "late-"))
    updates = 0 if not interval or fixed else steps // max(1, int(interval))
    return summary.saved_s + steps * (last.step_saving or 0.0) - updates * summary.update_s


def _stretch_prediction(
    prediction: Prediction | None, stretch: Stretch, adoption: Adoption | None
) -> tuple[float | None, str]:
    """Return the predicted speedup under the map of a stretch, and of what: the whole ``step`` or the ``linears``."""
    if adoption is None or not stretch.quantised:
        return None, ""
    step, precision_map = adoption.figure("step_speedup"), adoption.precision_map
    if step is None and precision_map is not None:
        step = precision_map.step_speedup if prediction is None else prediction.step_speedup(precision_map)
    if step is not None:
        return step, "step"
    return (None, "") if adoption.speedup is None else (adoption.speedup, "linears")


# -- loss and memory -----------------------------------------------------------------------------------------------
def _loss_cost(run: RunData) -> LossCost | None:
    """Return the predicted loss of the map in force. None if there is no such map, or it has no scores."""
    last = run.adoptions[-1] if run.adoptions else None
    if last is None or last.precision_map is None or not last.scores:
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
    # Under loss= a plan minimises time. The objective of each of its maps is a loss under any budget.
    if plans and backward:
        at_end = math.fsum(phase.precision_map.objective or 0.0 for phase in plans[-1].phases)
    return LossCost(
        last.version, nats, low, high, backward, _validation_rise(run, last.step), steps, at_end, run.bound,
        _bf16_loss(run, nats), last.figure("measured_rise"), last.figure("measured_error"),
    )  # fmt: skip


def _sum_of_scores(precision_map: PrecisionMap, scores: Mapping[str, Any], name: str) -> float:
    by_option = [(scores.get(option), fmt.value) for option, fmt in precision_map.choices.items()]
    chosen = [by_format.get(fmt) for by_format, fmt in by_option if isinstance(by_format, Mapping)]
    return math.fsum(number(score.get(name)) or 0.0 for score in chosen if isinstance(score, Mapping))


def _validation_rise(run: RunData, since: int) -> float | None:
    """Return the latest validation loss in the map's formats minus that in bf16.

    None unless the latest validation after step ``since`` was in both.
    """
    validations = run.validations()
    quantised, bf16 = (validations.get(formats, {}) for formats in ("map", "bf16"))
    last = max(quantised.keys() | bf16.keys(), default=since)
    return quantised[last] - bf16[last] if last > since and last in quantised and last in bf16 else None


def _bf16_loss(run: RunData, rise: float) -> float | None:
    """Return the loss of the last validation in bf16, or the mean of the last 20 losses without ``rise``."""
    validations = run.validations().get("bf16", {})
    losses = [loss for loss in run.series("loss")[1] if loss is not None][-20:]
    return validations[max(validations)] if validations else math.fsum(losses) / len(losses) - rise if losses else None


def _slope(run: RunData) -> float | None:
    """Return by how much the loss falls in a step, from the last fifth of the steps. None if noise hides it."""
    losses = [value for value in run.series("loss")[1] if value is not None]
    half = len(losses) // 10
    if 2 * half < _MIN_SLOPE_LOSSES:
        return None
    first, second = losses[-2 * half : -half], losses[-half:]
    fall = float(np.mean(first) - np.mean(second))
    error = math.sqrt((np.var(first, ddof=1) + np.var(second, ddof=1)) / half)
    return fall / half if fall > _MIN_SLOPE_ERRORS * error else None


def _memory(run: RunData) -> Memory | None:
    peaks = [(row["step"], int(peak)) for row in run.metrics if (peak := number(row.get("peak_bytes"))) is not None]
    if not peaks:
        return None
    first = min((event["step"] for event in run.events if event["event"] in ("probe", "dropped")), default=None)
    before = [peak for step, peak in peaks if first is not None and step < first]
    return Memory(max(peak for _, peak in peaks), max(before, default=None), run.facts.get("device", "cpu") == "cpu")


# -- verdict -------------------------------------------------------------------------------------------------------
def _verdict(summary: RunSummary, run: RunData) -> tuple[str, str, list[str]]:
    """Return the verdict, the reason if it is neither yes nor no, and warnings, of which some may be empty."""
    judged = summary.judged
    if not any(stretch.quantised for stretch in summary.maps):
        return "no map", f"every step so far was in bf16: {_why_no_map(run, summary.steps)}", []
    if summary.why:
        return "not judged", summary.why, []
    if judged is None or judged.speedup is None or summary.saved_s is None:
        if summary.bf16_s is not None:
            return "too early", f"fewer than {STEPS} usual steps ran under a map", []
        few = f"usual steps in bf16 to compare with are {summary.bf16_steps}, {STEPS} are needed: use a later"
        return "not judged", f"{few} --snip-first-update", []
    total, pays = summary.saved_s if summary.saved_run_s is None else summary.saved_run_s, summary.steps_to_pay
    of_map, speedup = f"under map {judged.version}", f"{judged.speedup:.2f} x"
    hint = ""
    predicted = judged.predicted if judged.predicted_of == "step" else None
    if predicted is not None and predicted > TOLERANCE and judged.speedup - 1.0 < 0.5 * (predicted - 1.0):
        hint = (
            f"less than half of the predicted gain was measured ({speedup}, predicted {predicted:.2f} x): measure this"
            " GPU with snip calibrate and give --snip-timings FILE"
        )
    if judged.speedup < TOLERANCE:
        slow = (
            f"steps {of_map} are not faster than in bf16 ({speedup}): if the GPU waits for its host, larger"
            " microbatches or fewer tensor parallel ranks help; else ask for what pays: --snip without a budget, snip"
            " plan"
        )
        return "no", "", [slow, hint]
    if total <= 0 and pays is not None and pays < (number(run.config.get("update_interval")) or 0.0):
        later = (
            f"a step {of_map} is {speedup} as fast as in bf16, and an update of {duration(summary.update_s)} pays for"
            f" itself after {pays:,} steps; this run had {judged.steps:,} of them"
        )
        return "in longer runs", later, [hint]
    if total <= 0:
        dear = (
            f"updates cost more than the maps save: one pays for itself after {pays or 0:,} steps; use a longer"
            " --snip-update-interval"
        )
        return "no", "", [dear, hint]
    if summary.loss is not None and (summary.loss.steps or 0.0) * (summary.bf16_s or 0.0) > total:
        lossy = (
            "the predicted rise of the loss costs more training time than was saved: ask for less, with a smaller"
            " --snip-budget or with --snip-budget loss=NATS"
        )
        return "no", "", [lossy, hint]
    return "yes", "", [hint]


def _why_no_map(run: RunData, steps: int) -> str:
    """Return why no quantised map was adopted, with what changes it."""
    config, last = run.config, {str(event["event"]): event for event in run.events}  # the last of each kind
    adopted = run.adoptions[-1] if run.adoptions else None
    precision_map = None if adopted is None else adopted.precision_map
    if adopted is not None and precision_map is not None and {Format.BF16} != set(precision_map.choices.values()):
        return f"map {adopted.version} was adopted before step {adopted.step}, and no step under it has ended"
    if run.adoptions and "submit" in last:
        return (
            f"the solver chose bf16 for every GEMM, because within --snip-budget {config.get('budget')} no other format"
            " is faster here; a looser budget, or larger microbatches, may change that"
        )
    if run.adoptions or not config.get("update_interval"):
        by = "policy" if config.get("update_interval") else "update_interval"
        by = next((name for name in ("map", "replay") if config.get(name)), by)
        return f"--snip-{by.replace('_', '-')} {config.get(by)} makes no other maps"
    if (failed := last.get("solve_failed")) is not None:
        return f"the solver gave no map ({failed.get('message')})"
    if (guard := last.get("guard")) is not None:
        return f"the guard refused its map ({guard.get('reason')})"
    if (submit := last.get("submit")) is not None:
        until = last.get("postpone", {}).get("until") or int(submit["step"]) + int(number(config.get("lag")) or 0)
        return (
            f"the map of the update of step {submit['step']} is adopted at step {until} at the earliest, and {steps}"
            " steps have run: train longer, or let training wait for it with --snip-wait 120"
        )
    for kind, text in (("dropped", "an update was dropped"), ("skipped", "an update was left out")):
        if (event := last.get(kind)) is not None:
            return f"{text} ({event.get('reason')})"
    if (postponed := last.get("postpone")) is not None:
        return f"{postponed.get('reason')} until step {postponed.get('until')}: --snip-wait 120 waits for them"
    first = number(run.facts.get("first_update")) or number(config.get("first_update")) or 0.0
    return (
        f"none was due, because the first update is before step {first:.0f}: train longer, or use --snip-first-update"
    )


# -- text ----------------------------------------------------------------------------------------------------------
def headline(summary: RunSummary) -> str:
    """Return the verdict in one sentence."""
    if summary.saved_s is None or summary.verdict not in ("yes", "no"):
        return f"Worth it: {summary.verdict}. {summary.why[:1].upper()}{summary.why[1:]}."
    text = f"{_saved(summary.saved_s)} so far"
    if summary.saved_run_s is not None and summary.total_steps is not None and summary.total_steps > summary.steps:
        text += f", {_saved(summary.saved_run_s)} over the run if this map stays"
    whole = (summary.bf16_s or 0.0) * summary.steps
    share = "" if not whole else f" ({summary.saved_s / whole:+.1%} of its time in bf16 so far)"
    hours = "" if summary.gpu_hours_saved is None else f": {summary.gpu_hours_saved:+,.2g} GPU hours so far"
    return f"Worth it: {summary.verdict}. {text[0].upper()}{text[1:]}{share}, all costs of SNIP included{hours}."


def sentences(summary: RunSummary) -> list[str]:
    """Return what is known of times, costs, loss and memory, one sentence each."""
    lost = ", ".join(f"{count} of {kind}" for kind, count in summary.lost.items())
    texts = (
        _steps_text(summary), _costs_text(summary), _loss_text(summary, summary.loss), _memory_text(summary),
        f"Records are missing, because the file system did not take them: {lost}." if lost else "",
    )  # fmt: skip
    return [text for text in texts if text]


def lines(summary: RunSummary) -> list[str]:
    """Return headline, sentences and warnings, as the end of a run prints them."""
    return [headline(summary), *sentences(summary), *(f"Warning: {warning}." for warning in summary.warnings)]


def _saved(seconds: float) -> str:
    return f"{'saved' if seconds >= 0 else 'lost'} {duration(abs(seconds))}"


def _steps_text(summary: RunSummary) -> str:
    parts = []
    if summary.bf16_s is not None:
        parts.append(f"{duration(summary.bf16_s)} in bf16 (median of {summary.bf16_steps} steps)")
    shown = summary.judged or next((m for m in reversed(summary.maps) if m.quantised and m.step_s), None)
    if shown is not None and shown.step_s is not None:
        mean = "" if shown.mean_s is None else f", mean {duration(shown.mean_s)}"
        speed = "" if shown.speedup is None else f": {shown.speedup:.2f} x"
        of = " for the linears alone" if shown.predicted_of == "linears" else ""
        predicted = "" if shown.predicted is None else f", {shown.predicted:.2f} x was predicted{of}"
        under = f"under map {shown.version} ({shown.steps:,} steps{mean})"
        parts.append(f"{duration(shown.step_s)} {under}{speed}{predicted}")
    if summary.over_fp8 is not None and summary.judged is not None and summary.judged is summary.maps[-1]:
        everywhere = (summary.judged.step_s or 0.0) * summary.over_fp8
        parts.append(f"{duration(everywhere)} with {summary.fp8} in every GEMM, as computed from times of GEMMs")
    return f"A step took {', '.join(parts)}." if parts else ""


def _costs_text(summary: RunSummary) -> str:
    if not summary.updates and not summary.cost_s:
        return ""
    share = "" if summary.cost_share is None else f", {summary.cost_share:.2%} of the time"
    largest = sorted(summary.costs.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{_COST_NAMES.get(kind, kind)} {duration(seconds)}" for kind, seconds in largest)
    count = "SNIP" if not summary.updates else "1 update" if summary.updates == 1 else f"{summary.updates:,} updates"
    pays = "" if summary.steps_to_pay is None else f"; an update pays for itself after {summary.steps_to_pay:,} steps"
    return f"{count} cost {duration(summary.cost_s)}{share}: {parts}{pays}."


def _loss_text(summary: RunSummary, loss: LossCost | None) -> str:
    if loss is None:
        return ""
    during = "" if loss.at_end is None else " while it is in force,"
    share = f"{loss.share}; " if loss.share else ""
    parts = [
        f"Map {loss.version} is predicted to raise the loss by {loss.nats:.2g} nats{during} over bf16 at equal weights"
        f" ({share}{loss.low:.2g} to {loss.high:.2g} nats as far as small models tell)"
    ]
    if loss.rise is not None:
        error = "" if loss.rise_error is None else f" ± {loss.rise_error:.1g}"
        parts.append(f"{loss.rise:.2g}{error} nats were measured before it was adopted")
    if loss.at_end is not None:
        bounds = "" if loss.bound is None else f": --snip-budget loss={loss.bound:g} bounds this figure, not the first"
        remaining = f"of all phases of its plan, {loss.at_end:.2g} nats are predicted to be left at the end of training"
        parts.append(remaining + bounds)
    if not loss.backward:
        parts.append("without the formats of dgrad and wgrad, whose cost these scores do not give in nats")
    if loss.measured is not None:
        parts.append(f"the last validation differs by {loss.measured:+.2g} between the map's formats and bf16")
    if loss.steps is not None:
        time = "" if summary.bf16_s is None or summary.why else f", {duration(loss.steps * summary.bf16_s)} of training"
        parts.append(f"at present the loss falls by as much in about {loss.steps:,.0f} steps{time}")
    return f"{'; '.join(parts)}."


def _memory_text(summary: RunSummary) -> str:
    memory = summary.memory
    if memory is None:
        return ""
    what = "resident memory" if memory.resident else "GPU memory"
    before = "" if memory.before is None else f", {memory.before / 2**30:.2f} GiB before the first update"
    return f"Peak of {what} on rank 0: {memory.peak / 2**30:.2f} GiB{before}."

"""What happens at a step boundary: adopt a map, run probes, submit to the sidecar, learn its answer.

Every rank calls :meth:`Controller.before_step` and :meth:`Controller.after_step` for every step. What a rank does there
follows from the step number and from broadcasts alone, so that all ranks enter the same collectives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from snip_megatron.adoption import Decision, MapChannel, Verdict
from snip_megatron.config import SnipConfig
from snip_megatron.controller_state import ControllerState, Pending
from snip_megatron.guard import Guard
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.precision import Format, PrecisionMap, fp4_fraction
from snip_megatron.reporting.sinks import Sink
from snip_megatron.statistics.table import StatisticsTable
from snip_megatron.step_report import StepFigures, StepReport
from snip_megatron.trigger import Trigger


class Probe(Protocol):
    """One update's measurement, run on all ranks before a step."""

    @property
    def table(self) -> StatisticsTable: ...

    @property
    def seconds(self) -> Mapping[str, float]: ...

    @property
    def tokens(self) -> int: ...

    @property
    def passes(self) -> Mapping[str, int]: ...


@dataclass(frozen=True)
class Unmeasured:
    """An update that cannot be measured now, by the verdict of all ranks: why, in words and figures."""

    reason: str
    figures: Mapping[str, float]


class Coordinator(Protocol):
    """Rank 0's side of an update: the sidecar and the run directory. Absent on other ranks."""

    def submit(self, step: int, table: StatisticsTable, version: int) -> None: ...

    def pump(self, step: int) -> None: ...

    def answered(self, version: int) -> bool: ...

    def decision(self, step: int, version: int) -> Decision: ...

    def initial_map(self, step: int) -> Decision: ...

    def replay_steps(self) -> list[int]: ...

    def replayed_map(self, step: int) -> Decision: ...

    def event(self, step: int, kind: str, /, **fields: Any) -> None: ...

    def metric(self, figures: StepFigures, fp4_fraction: float) -> None: ...

    def adopted(self, step: int, precision_map: PrecisionMap) -> None: ...

    def close(self) -> None: ...


class Controller:
    """The loop of the method on one rank.

    Args:
        config: the run's configuration.
        registry: this rank's linears.
        channel: agreement over all ranks.
        report: the per-step loss collective.
        flops: linear's global name → FLOPs of one of its GEMMs a token, for the fp4 share.
        coordinator: rank 0's duties; None on other ranks.
        sink: Megatron's own wandb run and TensorBoard log, which only its last rank has; a no-op elsewhere.
        clip_grad: Megatron's ``--clip-grad``; 0 for none.
        restored: state from a checkpoint; None for a fresh run.
        unquantised: FLOPs a token of the decoder's linears that no map covers, all GEMMs together.
    """

    def __init__(
        self,
        config: SnipConfig,
        registry: LinearRegistry,
        channel: MapChannel,
        report: StepReport,
        flops: Mapping[str, float],
        coordinator: Coordinator | None,
        sink: Sink,
        clip_grad: float,
        restored: ControllerState | None = None,
        *,
        unquantised: float = 0.0,
    ) -> None:
        self._config = config
        self._registry = registry
        self._channel = channel
        self._report = report
        self._flops = dict(flops)
        self._unquantised = unquantised
        self._coordinator = coordinator
        self._sink = sink
        self._clip_grad = clip_grad
        self._fraction = fp4_fraction(registry.current, self._flops, unquantised)
        self._fractions: dict[int, float] = {}  # of steps whose loss is still on its way
        self._started = False
        self._next_step = 0
        self._replay_steps: list[int] = []
        self._answered = False  # rank 0 knows the pending update's outcome, by the latest figures that arrived
        self._restored = restored
        self.state = ControllerState() if restored is None else restored
        self._guard = Guard(config.guard) if config.updates else None  # fixed maps are the user's
        if self._guard is not None:
            if self.state.guard is not None:
                self._guard.restore(self.state.guard, "SNIP state in the checkpoint")
            else:
                self._guard.good = self.state.precision_map
        self._trigger = Trigger(config.trigger) if config.updates and config.trigger > 0 else None
        if self._trigger is not None and self.state.trigger is not None:
            self._trigger.restore(self.state.trigger, "SNIP state in the checkpoint")

    # -- step boundary -----------------------------------------------------------------------------------------
    def before_step(self, step: int, probe: Callable[[float], Probe | Unmeasured]) -> None:
        """Everything that precedes ``train_step(step)``: start, decision due, update due.

        Args:
            step: 0-based.
            probe: runs the probes of this step, given the factor of gradient clipping.
        """
        self._sink.begin_step(step)
        if not self._started:
            self._start(step)
        if self._coordinator is not None:
            self._coordinator.pump(step)
        while self._replay_steps and self._replay_steps[0] <= step:
            due = self._replay_steps.pop(0)
            self._adopt(step, self._channel.agree(self._coordinator.replayed_map(due) if self._coordinator else None))
        self._take_back(step)
        pending = self.state.pending
        if pending is not None and step >= pending.due:
            self._decide(step, pending)
        triggered = self._triggered(step)
        if self._config.is_update_step(step) or triggered:
            self._update(step, probe)
        self._registry.start_step(step)

    def after_step(
        self,
        step: int,
        loss: torch.Tensor | None,
        grad_norm: float | None,
        gradients: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        """Note the step's figures; the previous step's, summed over ranks by now, are written down.

        ``gradients`` gives this rank's share of the linears' ‖∇W‖²; asked at the steps that the trigger looks at.
        """
        self._next_step = step + 1
        self._registry.end_step()
        self.state.grad_norm = grad_norm
        self._fractions[step] = self._fraction
        looks = gradients is not None and self._trigger is not None and self._trigger.looks_at(step)
        pending = self.state.pending
        answered = pending is not None and self._coordinator is not None and self._coordinator.answered(pending.version)
        shares = gradients() if looks and gradients else None
        figures = self._report.exchange(step, loss, grad_norm, shares, answered=answered)
        self._answered = figures is not None and figures.answered
        if figures is not None and figures.gradients is not None and self._trigger is not None:
            self._trigger.observe(figures.gradients)
        if figures is not None and self._guard is not None:
            self.state.alarm = self._guard.observe(figures, self._registry.current) or self.state.alarm
        self._metric(figures)

    def state_to_save(self) -> bytes:
        """What a checkpoint keeps, on every rank; call it between two steps."""
        self.state.in_flight = self._report.in_flight()
        self._metric(self.state.in_flight)  # now: a process killed after the save would take them along
        self.state.guard = None if self._guard is None else self._guard.as_dict()
        self.state.trigger = None if self._trigger is None else self._trigger.as_dict()
        return self.state.to_bytes()

    def validated(self, losses: Mapping[str, float]) -> None:
        """Note validation losses, by the formats they were measured in (``map``, ``bf16``)."""
        for formats, loss in losses.items():
            self._event(self._next_step, "validation", formats=formats, loss=loss)

    def close(self, *, together: bool) -> None:
        """The end of training: the last step's figures, then rank 0's processes and files.

        Args:
            together: whether all ranks get here, so that the collective in flight can be waited for.
        """
        figures = self._report.drain() if together else None
        if self._coordinator is None:
            return
        if figures is not None and figures.step in self._fractions:  # else a checkpoint after it wrote them down
            # Not to the sink: Megatron has closed its loggers by now.
            self._coordinator.metric(figures, self._fractions.pop(figures.step))
        self._coordinator.close()

    # -- maps --------------------------------------------------------------------------------------------------
    def _start(self, step: int) -> None:
        """The first step of this process: the map to begin with, a replay's schedule, a restored update's solve."""
        self._started = True
        if self._config.replay is not None:
            steps = self._coordinator.replay_steps() if self._coordinator else None
            self._replay_steps = [s for s in self._channel.agree_steps(steps) if s >= step]
        first = self._coordinator.initial_map(step) if self._coordinator else None
        decision = self._channel.agree(first)
        restored = self.state.precision_map if self._restored is not None else None
        if decision.verdict is Verdict.MAP:  # named by the configuration: it wins over a checkpoint's
            self._adopt(step, decision)
        elif restored is not None:
            self._adopt(step, self._channel.agree(Decision(Verdict.MAP, restored) if self._coordinator else None))
        if not self._config.updates:
            self.state.pending = None
        if self.state.pending is not None and self._coordinator is not None:
            self._coordinator.submit(self.state.pending.step, self.state.pending.table, self.state.pending.version)

    def _decide(self, step: int, pending: Pending) -> None:
        """All ranks learn whether rank 0 has the map; if not, the decision waits for another whole lag (rule 6)."""
        started = time.perf_counter()
        again = pending.due > pending.step + self._config.lag
        if again and not self._answered and not self._config.wait:
            decision = Decision(Verdict.NOT_READY)  # the step's figures told it to all ranks: nothing to wait for
        else:
            own = self._coordinator.decision(step, pending.version) if self._coordinator else None
            decision = self._channel.agree(own)
        if decision.verdict is Verdict.NOT_READY:
            pending.due = step + self._config.lag
            self._event(step, "postpone", version=pending.version, until=pending.due, wait_s=_since(started))
            return
        self.state.pending = None
        if decision.precision_map is None:
            return
        refusal = self._guard.refuses(decision.precision_map) if self._guard is not None else None
        if refusal is not None:
            self._event(
                step, "guard", action="refused", version=pending.version, reason=refusal, wait_s=_since(started)
            )
            return
        self._adopt(step, decision, started)
        self._restart_trigger(step)
        if self._guard is not None:
            self._guard.adopted(step)

    def _take_back(self, step: int) -> None:
        """Act on the guard's verdict, which every rank reached from the same figures: the last good map again."""
        alarm, self.state.alarm = self.state.alarm, None
        if alarm is None or self._guard is None:
            return
        started = time.perf_counter()
        failed = self._registry.current
        good = self._guard.good or PrecisionMap.uniform(self._registry.names, Format.BF16)
        decision = self._channel.agree(Decision(Verdict.MAP, good) if self._coordinator is not None else None)
        self._guard.taken_back(failed)
        self._event(
            step,
            "guard",
            action="taken_back",
            version=failed.version,
            back_to=good.version,
            reason=alarm.reason,
            alarm_step=alarm.step,
            loss=alarm.loss,
            limit=alarm.limit,
            wait_s=_since(started),
        )
        self._adopt(step, decision, started)
        self._restart_trigger(step)

    def _adopt(self, step: int, decision: Decision, started: float | None = None) -> None:
        new = decision.precision_map
        if new is None:
            return
        started = time.perf_counter() if started is None else started
        names = self._registry.names
        changed = int((new.to_codes(names) != self._registry.current.to_codes(names)).sum())
        self._registry.adopt(new)
        self.state.precision_map = new
        self.state.version = max(self.state.version, new.version)
        fraction = self._fraction = fp4_fraction(new, self._flops, self._unquantised)
        self._event(
            step,
            "adopt",
            version=new.version,
            status=new.status,
            achieved=new.achieved,
            achieved_per_stage=dict(new.achieved_per_stage),
            fp4_fraction=fraction,
            **new.prediction(),
            changed=changed,
            wait_s=_since(started),
        )
        self._sink.precision_map(step, new, names)
        if self._coordinator is not None:
            self._coordinator.adopted(step, new)

    # -- updates -----------------------------------------------------------------------------------------------
    def _triggered(self, step: int) -> bool:
        """Whether gradients have drifted far enough; never while an update is on its way."""
        if self._trigger is None or self.state.pending is not None:
            return False
        reason = self._trigger.reason()
        if reason is not None:
            self._event(step, "trigger", **reason)
        return reason is not None

    def _restart_trigger(self, step: int) -> None:
        """After an update's begin, and under another map, whose gradients have another rounding noise."""
        if self._trigger is not None:
            self._trigger.restart(step)

    def _update(self, step: int, probe: Callable[[float], Probe | Unmeasured]) -> None:
        if self.state.pending is not None:
            self._event(step, "skipped", reason="the previous update is still undecided")
            return
        self._restart_trigger(step)
        started = time.perf_counter()
        result = probe(self._clip_factor())
        seconds = _since(started)
        if isinstance(result, Unmeasured):
            self._event(step, "dropped", reason=result.reason, **result.figures, wait_s=seconds)
            return
        for kind, value in result.seconds.items():
            event = "collect" if kind == "reduction" else "probe"
            passes = {"passes": result.passes[kind]} if kind in result.passes else {}
            self._event(step, event, kind=kind, seconds=value, tokens=result.tokens, **passes, wait_s=value)
        broken = result.table.non_finite()  # the table is the same on all ranks: so is this verdict
        if broken:
            self._event(step, "dropped", reason=f"not finite: {broken[0]}", columns=len(broken), wait_s=0.0)
            return
        self.state.measured = result.table.measured
        version = self.state.version + 1
        self.state.version = version
        self.state.pending = Pending(step, step + self._config.lag, version, result.table)
        submitted = time.perf_counter()
        if self._coordinator is not None:
            self._coordinator.submit(step, result.table, version)
        size = sum(array.nbytes for array in result.table.arrays().values())
        self._event(step, "submit", version=version, table_bytes=size, wait_s=_since(submitted), update_seconds=seconds)

    def _clip_factor(self) -> float:
        """What gradient clipping multiplied the last step's gradient by; 1 where its norm says nothing."""
        norm = self.state.grad_norm
        if norm is None or not math.isfinite(norm) or self._clip_grad <= 0:
            return 1.0
        return min(1.0, self._clip_grad / (norm + 1e-6))

    # -- figures -----------------------------------------------------------------------------------------------
    def _metric(self, figures: StepFigures | None) -> None:
        if figures is None or figures.step not in self._fractions:  # a step of the process before this one
            return
        fraction = self._fractions.pop(figures.step)
        self._sink.metric(figures.step, fp4_fraction=fraction)
        if self._coordinator is not None:
            self._coordinator.metric(figures, fraction)

    def _event(self, step: int, kind: str, /, **fields: Any) -> None:
        self._sink.event(step, kind, **fields)
        if self._coordinator is not None:
            self._coordinator.event(step, kind, **fields)


def _since(started: float) -> float:
    return round(time.perf_counter() - started, 6)

"""The controller, which runs at every step boundary: it adopts maps, runs probes and submits updates to the sidecar.

Every rank calls :meth:`Controller.before_step` and :meth:`Controller.after_step` for every step. All decisions depend
only on the step number and on data that all ranks share, so that all ranks enter the same collectives.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.precision import Format, PrecisionMap, format_shares, fp4_fraction
from snip_megatron.precision.phases import PrecisionPlan
from snip_megatron.precision.strict_json import is_finite
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.coordinator import RankZeroCoordinator
from snip_megatron.runtime.exchange import Decision, MapChannel, StepFigures, StepReport
from snip_megatron.runtime.guard import Guard, GuardState
from snip_megatron.runtime.host import Kernels, ProbeResult, Sink, Unmeasured
from snip_megatron.runtime.schedule_state import ScheduleState, Timeline
from snip_megatron.runtime.state import ControllerState, Goal, Pending


class Controller:
    """The loop of SNIP on one rank.

    ``coordinator`` is the work of rank 0, None on other ranks. ``sink`` is Megatron's wandb run and TensorBoard log,
    which does nothing on ranks that have none. ``clip_grad`` is Megatron's ``--clip-grad``, 0 for none; ``restored``
    the state of a checkpoint, None for a fresh run; ``unquantised`` the FLOPs a token of the decoder's linears that no
    map covers, for all GEMMs together; ``kernels`` what maps and updates need, None if they need none; ``timeline`` the
    time of the run, None if its end is unknown.
    """

    def __init__(
        self,
        config: SnipConfig,
        registry: LinearRegistry,
        channel: MapChannel,
        report: StepReport,
        coordinator: RankZeroCoordinator | None,
        sink: Sink,
        clip_grad: float,
        restored: ControllerState | None = None,
        *,
        unquantised: float = 0.0,
        kernels: Kernels | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self._config = config
        self._registry = registry
        self._channel = channel
        self._report = report
        self._flops = {row.name: row.flops for row in registry.rows}
        self._unquantised = unquantised
        self._coordinator = coordinator
        self._kernels = kernels
        self._ready = kernels is None  # whether all ranks have their kernels; equal on all ranks
        self._first_step = 0
        self._sink = sink
        self._fraction = self._share(registry.current)
        self._fractions: dict[int, float] = {}  # fp4 shares of the steps whose loss has not arrived yet
        self._started = False
        self._next_step = 0
        self._replay_steps: list[int] = []
        self._answered = False  # whether rank 0 has the pending update's outcome, according to the latest figures
        self._restored = restored
        self.state = ControllerState() if restored is None else restored
        self._schedule = ScheduleState(self.state, timeline, self._share)
        self._guard: Guard | None = None
        if config.updates:  # maps that the user fixed are never taken back
            new = GuardState(good=self.state.precision_map)
            self._guard = Guard(config, self.state.guard or new)
        self.state.guard = None if self._guard is None else self._guard.state
        self._updates = Updates(
            config, self.state, self._schedule, registry, coordinator, self._event, self._say,
            self._has_kernels, clip_grad,
        )  # fmt: skip

    # -- step boundary -----------------------------------------------------------------------------------------
    def before_step(self, step: int, probe: Callable[[float], ProbeResult | Unmeasured]) -> None:
        """Run everything that precedes ``train_step(step)``, a 0-based step: adoptions that are due, and an update that
        is due. ``probe`` runs the probes of this step; its argument is the factor of gradient clipping.
        """
        self._sink.begin_step(step)
        if not self._started:
            self._start(step)
        if self._coordinator is not None:
            self._coordinator.pump(step)
        while self._replay_steps and self._replay_steps[0] <= step:
            due = self._replay_steps.pop(0)
            own = Decision(self._coordinator.replay[due]) if self._coordinator else None
            self._adopt(step, self._channel.agree(own))
        self._take_back(step)
        pending = self.state.pending
        if pending is not None and step >= pending.due:
            self._decide(step, pending)
        if self._schedule.due(step):
            self._next_phase(step)
        self._updates.start_if_due(range(self._next_step, step + 1), probe)
        self._registry.start_step(step)

    def decide_now(self, step: int) -> None:
        """Adopt the map of the update that began before ``step``, without a lag, if rank 0 has it."""
        if self.state.pending is not None:
            self._decide(step, self.state.pending)
            self._registry.start_step(step)

    def after_step(self, step: int, loss: torch.Tensor | None, grad_norm: float | None) -> None:
        """Exchange the figures of a step, and record those of the previous step, which have arrived.

        ``loss`` is None on ranks that have none, and ``grad_norm`` the norm before clipping.
        """
        self._next_step = step + 1
        self._registry.end_step()
        self.state.grad_norm = grad_norm if is_finite(grad_norm) else None
        self._fractions[step] = self._fraction
        self._schedule.ran(self._registry.current, self._fraction)
        pending = self.state.pending
        answered = pending is not None and self._coordinator is not None and self._coordinator.answered(pending.version)
        compiled = self._kernels is None or self._kernels.finish(0.0)
        figures = self._report.exchange(step, loss, grad_norm, answered=answered, ready=compiled)
        self._answered = figures is not None and figures.answered
        if figures is not None and figures.ready and figures.step >= self._first_step:
            self._take_kernels(step)
        if figures is not None and self._guard is not None:
            self.state.alarm = self._guard.observe(figures, self._registry.current) or self.state.alarm
        self._metric(figures)

    def state_to_save(self) -> bytes:
        """Return the state for a checkpoint. Every rank must call it, between two steps."""
        self.state.in_flight = self._report.in_flight()
        self._metric(self.state.in_flight)  # record them now: they would be lost if the process were killed
        return self.state.to_bytes()

    def validated(self, losses: Mapping[str, float], kind: str = "validation", **which: str) -> None:
        """Record losses by the formats of the evaluation (``map``, ``bf16``).

        ``kind`` is ``validation`` or ``test``, and ``which`` names the set where there are several.
        """
        for formats, loss in losses.items():
            self._event(self._next_step, kind, formats=formats, loss=loss, **which)

    def captured(self, step: int, kind: str, seconds: float, fields: Mapping[str, Any]) -> None:
        """CUDA graphs were made in this step: for the first time ("capture"), or for another map ("recapture")."""
        self._event(step, kind, seconds=round(seconds, 6), **fields, wait_s=round(seconds, 6))

    def close(self, *, together: bool) -> None:
        """End the run: record the last step's figures, and close rank 0's process and files.

        Only if all ranks call this ``together``, the outstanding collective can be waited for.
        """
        if self._kernels is not None:
            self._kernels.close()
        figures = self._report.drain() if together else None
        if self._coordinator is None:
            return
        if figures is not None and figures.step in self._fractions:  # otherwise a checkpoint has recorded them
            # They do not go to the sink, because Megatron has closed its loggers by now.
            self._coordinator.metric(figures, self._fractions.pop(figures.step))
        self._coordinator.close()

    # -- maps --------------------------------------------------------------------------------------------------
    def _start(self, step: int) -> None:
        """Prepare the first step of this process: the initial map, a replay's schedule, a restored update."""
        self._started, self._next_step, self._first_step = True, step, step
        if self._config.replay is not None:
            steps = sorted(self._coordinator.replay) if self._coordinator else None
            self._replay_steps = [s for s in self._channel.agree(steps) if s > step]
        first = self._coordinator.initial_map(step) if self._coordinator else None
        decision = self._channel.agree(first)
        restored = self.state.precision_map if self._restored is not None else None
        self._begin_plan(step)
        if decision.precision_map is not None:  # a map given by the configuration replaces that of the checkpoint
            self._adopt(step, decision)
        elif self._schedule.changes(step, restored, self._registry.names):
            self._next_phase(step)
        elif restored is not None:
            self._adopt(step, self._offered(restored))
        if not self._config.updates:
            self.state.pending = None
        self._take_goal(step)
        pending = self.state.pending
        if pending is not None and self._coordinator is not None:
            self._coordinator.submit(pending.step, pending.table, pending.version, pending.phases)
        started = time.perf_counter()
        if self._kernels is not None and self._kernels.begin():
            self._take_kernels(step, started)

    def _has_kernels(self) -> bool:
        """Return whether all ranks have their kernels. ``--snip-wait`` waits for them as for maps. Collective."""
        if not self._ready and self._kernels is not None and self._config.wait:
            started = time.perf_counter()
            if self._channel.everywhere(self._kernels.finish(self._config.wait)):
                self._take_kernels(self._next_step, started)
        return self._ready

    def _take_kernels(self, step: int, started: float | None = None) -> None:
        """Note that all ranks have their kernels, which training has waited for since ``started``."""
        if self._ready or self._kernels is None:
            return
        self._ready, started = True, time.perf_counter() if started is None else started
        figures = self._kernels.complete()
        if figures:
            self._event(step, "compile", **figures, wait_s=since(started))

    def _begin_plan(self, step: int) -> None:
        """Restore the account and the plan of the run, or make the plan of a policy that needs no statistics."""
        moved = self._schedule.begin(step)
        if moved is not None:
            self._event(step, "plan_moved", **moved)
            ends = "training now ends at step {last} instead of {last_before}".format_map(moved)
            self._say(f"{ends}: phases begin at the same fractions of the run")
            if self.state.plan is not None:
                self._event(step, "plan", **self._schedule.figures(step))
        fixed = self._schedule.fixed_plan(step)
        if fixed is not None:
            self._take_plan(step, self._channel.agree(None if self._coordinator is None else fixed))

    def _take_goal(self, step: int) -> None:
        """Take the goal of this run. If the checkpoint's was another, say how long its maps go on.

        An update that is undecided is solved for the new goal, so that its phases are those of the new schedule.
        """
        goal, state = Goal.of(self._config), self.state
        changed = "" if state.goal is None else goal.difference(state.goal)
        state.goal = goal
        if not changed or not self._config.updates:
            return
        if state.pending is not None:
            state.pending.phases = self._schedule.request(step, state.pending.due, self._registry.current)
        if state.precision_map is not None:
            what = "map" if state.plan is None else "plan"
            self._say(
                f"the checkpoint is of a run with {changed}: its {what} goes on until the next update's is adopted"
            )

    def _next_phase(self, step: int) -> None:
        started = time.perf_counter()
        decision = self._offered(self._schedule.enter(step))
        self._event(step, "phase", **self._schedule.figures(step))
        self._adopt(step, decision, started)
        if self._guard is not None:
            self._guard.adopted(step)

    def _take_plan(self, step: int, plan: PrecisionPlan) -> None:
        self._schedule.take(plan, step)
        if self._coordinator is not None and self.state.plan is not None:
            self._coordinator.planned(step, self.state.plan)
        self._event(step, "plan", **self._schedule.figures(step))

    def _offered(self, precision_map: PrecisionMap) -> Decision:
        """Agree on a map that all ranks know already."""
        return self._channel.agree(Decision(precision_map) if self._coordinator is not None else None)

    def _decide(self, step: int, pending: Pending) -> None:
        """Adopt the pending update's map if rank 0 has it. Otherwise postpone the decision by another lag."""
        started = time.perf_counter()
        again = pending.due > pending.step + self._config.lag
        unanswered = again and not self._answered and not self._config.wait
        if unanswered or not self._has_kernels():
            decision = Decision(ready=False)  # all ranks know this from the step's figures: no broadcast needed
        else:
            own = self._coordinator.decision(step, pending.version) if self._coordinator else None
            decision = self._channel.agree(own)
        if not decision.ready:
            pending.due = step + self._config.lag
            self._event(step, "postpone", version=pending.version, until=pending.due, wait_s=since(started))
            return
        self.state.pending = None
        if decision.precision_map is None:
            self._event(step, "kept", version=pending.version, wait_s=since(started))
            return
        refusal = self._guard.refuses(decision.precision_map) if self._guard is not None else None
        if refusal is not None:
            self._guarded(step, "refused", pending.version, refusal, wait_s=since(started))
            return
        if decision.plan is not None and pending.phases is not None:
            self._take_plan(step, decision.plan)
            decision = Decision(self._schedule.enter(step))
        self._adopt(step, decision, started)
        if self._guard is not None:
            self._guard.adopted(step)

    def _take_back(self, step: int) -> None:
        """If the guard raised an alarm, adopt the last good map again. All ranks have the same alarm."""
        alarm, self.state.alarm = self.state.alarm, None
        if alarm is None or self._guard is None:
            return
        started = time.perf_counter()
        failed = self._registry.current
        good = self._guard.state.good or PrecisionMap.uniform(self._registry.names, Format.BF16)
        decision = self._offered(good)
        self._guard.taken_back(failed)
        self._schedule.drop()
        figures = {"back_to": good.version, "alarm_step": alarm.step, "loss": alarm.loss, "limit": alarm.limit}
        self._guarded(step, "taken_back", failed.version, alarm.reason, **figures)
        self._adopt(step, decision, started)

    def _guarded(self, step: int, action: str, version: int, reason: str, **fields: Any) -> None:
        """Record what the guard did with a map. Rank 0 prints it."""
        self._event(step, "guard", action=action, version=version, reason=reason, **fields)
        self._say(f"step {step}: the guard has {action.replace('_', ' ')} map {version}: {reason}")

    def _adopt(self, step: int, decision: Decision, started: float | None = None) -> None:
        new = decision.precision_map
        if new is None:
            return
        started = time.perf_counter() if started is None else started
        if self._kernels is not None and not self._ready:  # of a replay, of a later phase, or before a begin
            self._kernels.finish()
        names = self._registry.names
        changed = int((new.to_codes(names) != self._registry.current.to_codes(names)).sum())
        self._registry.adopt(new)
        self.state.precision_map = new
        self.state.version = max(self.state.version, new.version)
        fraction = self._fraction = self._share(new)
        shares = format_shares(new, self._flops, self._unquantised)
        self._sink.precision_map(step, new, names)
        if self._coordinator is not None:
            self._coordinator.adopted(step, new)  # before the event, which counts its time
        self._event(
            step,
            "adopt",
            version=new.version,
            status=new.status,
            achieved=new.achieved,
            achieved_per_stage=dict(new.achieved_per_stage),
            fp4_fraction=fraction,
            formats={fmt.value: round(share, 6) for fmt, share in shares.items()},
            **new.prediction(),
            changed=changed,
            wait_s=since(started),
        )

    # -- figures -----------------------------------------------------------------------------------------------
    def _say(self, line: str) -> None:
        if self._coordinator is not None:
            print(f"snip: {line}", flush=True)

    def _share(self, precision_map: PrecisionMap) -> float:
        return fp4_fraction(precision_map, self._flops, self._unquantised)

    def _metric(self, figures: StepFigures | None) -> None:
        if figures is None or figures.step not in self._fractions:  # the step was run by an earlier process
            return
        fraction = self._fractions.pop(figures.step)
        self._sink.metric(figures.step, fp4_fraction=fraction, **figures.account)
        if self._coordinator is not None:
            self._coordinator.metric(figures, fraction)

    def _event(self, step: int, kind: str, /, **fields: Any) -> None:
        self._sink.event(step, kind, **fields)
        if self._coordinator is not None:
            self._coordinator.event(step, kind, **fields)


@dataclass(frozen=True)
class Updates:
    """Starts updates.

    ``schedule`` is what an update of a run with phases plans from, ``coordinator`` the work of rank 0, None on other
    ranks; ``event`` and ``say`` record an event, and print a line on rank 0; ``ready`` returns whether all ranks have
    the kernels of an update; ``clip_grad`` is Megatron's ``--clip-grad``, 0 for none.
    """

    config: SnipConfig
    state: ControllerState
    schedule: ScheduleState
    registry: LinearRegistry
    coordinator: RankZeroCoordinator | None
    event: Callable[..., None]
    say: Callable[[str], None]
    ready: Callable[[], bool]
    clip_grad: float

    def start_if_due(self, steps: range, probe: Callable[[float], ProbeResult | Unmeasured]) -> None:
        """Start an update if one is due. Without kernels it is postponed by a lag.

        ``steps`` end with the one that is next, after those that training has left out since the last one. An update
        that was due before one of these starts now. ``probe`` is that of :meth:`Controller.before_step`.
        """
        step, state = steps[-1], self.state
        if not (any(map(self.config.is_update_step, steps)) or state.postponed in steps):
            return
        if self.ready():
            state.postponed = None
            self._start(step, probe)
        else:
            state.postponed = step + self.config.lag
            self.event(step, "postpone", reason="kernels are being compiled", until=state.postponed)

    def _start(self, step: int, probe: Callable[[float], ProbeResult | Unmeasured]) -> None:
        if self.state.pending is not None:
            self.event(step, "skipped", reason="the previous update is still undecided")
            return
        due = step + self.config.lag
        phases = self.schedule.request(step, due, self.registry.current)
        if phases is None and self.schedule.solves:
            self.event(step, "skipped", reason="training ends before its plan would come into force")
            return
        started = time.perf_counter()
        result = probe(self._clip_factor())
        seconds = since(started)
        if isinstance(result, Unmeasured):
            self._drop(step, result.reason, **result.figures, wait_s=seconds)
            return
        self.state.sequences = result.sequences
        for kind, fields in result.events():
            self.event(step, kind, **fields)
        broken = result.table.non_finite()  # equal on all ranks, because the table is
        if broken:
            self._drop(step, f"not finite: {broken[0]}", columns=len(broken), wait_s=0.0)
            return
        of_linears = zip(result.table.linears, result.table.linear["g2"], strict=True)
        unreached = [row.name for row, gradient in of_linears if not gradient]
        if len(unreached) == len(result.table.linears):  # every option would score zero
            self._drop(step, "no gradient: the loss leaves out all tokens of the probe", wait_s=0.0)
            return
        if unreached and not self.state.version:
            self.say(
                f"no gradient reaches {unreached[0]} ({len(unreached)} such linears): their errors seem to cost"
                " nothing; keep them wide with --snip-pin"
            )
        self.state.version += 1
        pending = self.state.pending = Pending(step, due, self.state.version, result.table, phases)
        own = sum(result.seconds.values())  # the passes have events of their own
        if self.coordinator is not None:
            own += self.coordinator.submit(step, result.table, pending.version, phases)
        rest = since(started) - own
        submitted: dict[str, Any] = {} if phases is None else {"phases": phases.as_dict()}
        submitted |= {"version": pending.version, "table_bytes": sum(a.nbytes for a in result.table.arrays.values())}
        self.event(step, "submit", **submitted, wait_s=round(rest, 6), update_seconds=seconds)

    def _drop(self, step: int, reason: str, **fields: Any) -> None:
        """Record an update that ends without statistics. Rank 0 prints it."""
        self.event(step, "dropped", reason=reason, **fields)
        self.say(f"the update of step {step} is dropped: {reason}")

    def _clip_factor(self) -> float:
        """Return the factor by which gradient clipping scaled the last step's gradient; 1 if the norm is unknown."""
        norm = self.state.grad_norm
        if norm is None or self.clip_grad <= 0:
            return 1.0
        return min(1.0, self.clip_grad / (norm + 1e-6))


def since(started: float) -> float:
    """Return the seconds since ``started``, a reading of ``time.perf_counter``."""
    return round(time.perf_counter() - started, 6)

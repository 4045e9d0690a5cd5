"""The controller, which runs at every step boundary: it adopts maps, runs probes and submits updates to the sidecar.

Every rank calls :meth:`Controller.before_step` and :meth:`Controller.after_step` for every step. All decisions depend
only on the step number and on data that all ranks share, so that all ranks enter the same collectives.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.precision import Format, PrecisionMap, format_shares, fp4_fraction
from snip_megatron.precision.phases import PrecisionPlan
from snip_megatron.precision.strict_json import is_finite
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.coordinator import RankZeroCoordinator
from snip_megatron.runtime.exchange import (
    Failure,
    MapChannel,
    StepFigures,
    StepReport,
    Transaction,
    UpdateDroppedError,
    is_true_on_any,
)
from snip_megatron.runtime.guard import Alarm, Guard, GuardState
from snip_megatron.runtime.host import ProbeResult, Sink
from snip_megatron.runtime.rise import Comparison, Rise, bound_of
from snip_megatron.runtime.solving import Candidate
from snip_megatron.runtime.state import ControllerState, Pending, ScheduleState, Timeline
from snip_megatron.runtime.warmup import WarmUp
from snip_megatron.sensitivity.policies import in_nats
from snip_megatron.sensitivity.table import StatisticsTable

Probe = Callable[[float], ProbeResult]
"""Runs the probes of a step. Its argument is the factor by which clipping scaled the last gradient. Collective."""

Measure = Callable[[Sequence[PrecisionMap]], list[Rise]]
"""Returns the rise of the loss under each map on a step's tokens. Collective.

This and :data:`Probe` raise UpdateDroppedError on all ranks if one has failed.
"""

Diagnose = Callable[[Alarm, PrecisionMap], Mapping[str, Any]]
"""Returns the fields of an event about what is to blame for an alarm under a map. Collective."""

_PATIENCE = 3
"""Number of dropped updates in a row from which on the time to the next try doubles."""

_LONGEST = 16
"""Update intervals after which a dropped update is tried again at the latest."""


OnAdopt = Callable[[int, PrecisionMap], object]
"""A user's function, which every rank calls with a step and the map in force from that step on."""


@dataclass(eq=False)
class Controller:
    """The loop of SNIP on one rank."""

    config: SnipConfig  # the configuration of the run, equal on all ranks
    registry: LinearRegistry  # the converted linears of this rank
    device: torch.device  # of the collectives
    coordinator: RankZeroCoordinator | None  # the work of rank 0. None on other ranks
    sink: Sink  # the host's loggers. They write nothing on ranks that have none
    clip_grad: float  # the host's limit of the gradient norm. 0 if gradients are not clipped
    restored: ControllerState | None = None  # the state of a checkpoint. None for a fresh run
    unquantised: float = 0.0  # FLOPs a token of the decoder's linears that no map covers, for all GEMMs together
    kernels: WarmUp | None = None  # the kernels that maps and updates need. None if all ranks have them
    timeline: Timeline | None = None  # the timeline of the run. None if its end is unknown
    # called for each map that is adopted, with those of a checkpoint and of phases. The first exception in it is
    # printed in one line, and training goes on
    on_adopt: OnAdopt | None = None

    def __post_init__(self) -> None:
        restored, news = self.restored, None if self.coordinator is None else self.coordinator.news
        self._channel = MapChannel(self.registry.names, self.device)  # broadcasts decisions of rank 0
        self._report = StepReport(self.device, None if restored is None else restored.in_flight, news)
        self._flops = {row.name: row.flops for row in self.registry.rows}
        self._fp4_share = self._fp4_share_of(self.registry.current)
        self._fp4_shares: dict[int, float] = {}  # of the steps whose loss has not arrived yet
        self._bound = bound_of(self.config)
        self._started = self._user_failed = False
        self._next_step = 0
        self._replay_steps: list[int] = []
        self.state = ControllerState() if restored is None else restored
        self._schedule = ScheduleState(self.state, self.timeline, self._fp4_share_of)
        self._guard = Guard(self.config, self.state.guard or GuardState(good=self.state.precision_map))
        self.state.guard = self._guard.state

    # -- step boundary -----------------------------------------------------------------------------------------
    def before_step(
        self, step: int, probe: Probe, measure: Measure | None = None, diagnose: Diagnose | None = None
    ) -> None:
        """Run everything that precedes the 0-based ``train_step(step)``: adoptions and an update that are due.

        Without ``measure``, maps are adopted on their predictions. ``diagnose`` finds out what is to blame before the
        guard takes a map back.
        """
        self.sink.begin_step(step)
        if not self._started:
            self._start(step)
        if self.coordinator is not None:
            self.coordinator.receive_results(step)
        while self._replay_steps and self._replay_steps[0] <= step:
            due = self._replay_steps.pop(0)
            self._adopt(step, self._channel.agree(self.coordinator.replay[due] if self.coordinator else None))
        self._take_back(step, diagnose)
        pending = self.state.pending
        if pending is not None and step >= pending.due:
            self._decide_or_drop(step, pending, measure)
        if self._schedule.begins_phase(step):
            self._next_phase(step, measure)
        self._start_update_if_due(range(self._next_step, step + 1), probe)
        self.registry.start_step(step)

    def decide_now(self, step: int, measure: Measure | None = None) -> None:
        """Adopt the map of the update that was submitted before ``step`` now, without a lag, if rank 0 has it."""
        if self.state.pending is not None:
            self._decide_or_drop(step, self.state.pending, measure)
            self.registry.start_step(step)

    def after_step(self, step: int, loss: torch.Tensor | None, grad_norm: float | None) -> None:
        """Exchange the figures of a step, and record those of the previous step, which have arrived.

        ``loss`` is the loss of the step, None on ranks that have none. ``grad_norm`` is the norm before clipping.
        """
        self._next_step = step + 1
        self.registry.end_step()
        self.state.grad_norm = grad_norm if is_finite(grad_norm) else None
        self._fp4_shares[step] = self._fp4_share
        self._schedule.spent.add(self._fp4_share, self.registry.current)
        figures = self._report.exchange(step, loss, grad_norm)
        if figures is not None:
            self.state.alarm = self._guard.observe(figures, self.registry.current) or self.state.alarm
        self._metric(figures)

    def state_to_save(self) -> bytes:
        """Return the state for a checkpoint. Every rank must call it, between two steps."""
        self.state.in_flight = self._report.in_flight()
        self._metric(self.state.in_flight)  # recorded now, because a kill would lose them
        return self.state.to_bytes()

    def record_losses(self, losses: Mapping[str, float], kind: str = "validation", **which: str) -> None:
        """Record losses by the formats of the evaluation (``map``, ``bf16``).

        ``kind`` is ``validation`` or ``test``. ``which`` names the validation set if there are several.
        """
        for formats, loss in losses.items():
            self._event(self._next_step, kind, formats=formats, loss=loss, **which)

    def record_capture(self, step: int, kind: str, seconds: float) -> None:
        """Record that CUDA graphs were made in this step.

        ``kind`` is ``capture`` for the first time and ``recapture`` after a change of the map.
        """
        self._event(step, kind, seconds=round(seconds, 6), wait_s=round(seconds, 6))

    def close(self, *, together: bool) -> None:
        """End the run: record the last step's figures, and close rank 0's process and files.

        ``together`` says whether all ranks call this. Only then the outstanding collective is waited for.
        """
        if self.kernels is not None:
            self.kernels.close()
        figures = self._report.drain() if together else None
        self.state.in_flight = None  # those of an earlier checkpoint have arrived since
        if self.coordinator is None:
            return
        if figures is not None and figures.step in self._fp4_shares:  # otherwise a checkpoint has recorded them
            # They do not go to the sink, because the host has closed its loggers by now.
            self.coordinator.metric(figures, self._fp4_shares.pop(figures.step))
        self.coordinator.close()

    # -- maps --------------------------------------------------------------------------------------------------
    def _start(self, step: int) -> None:
        """Prepare the first step of this process: the initial map, the steps of a replay, a restored update."""
        self._started, self._next_step = True, step
        kernels, self.kernels = self.kernels, None  # they are listed for the map in force, after its adoption
        if self.config.replay is not None:
            steps = sorted(self.coordinator.replay) if self.coordinator else []
            self._replay_steps = [s for s in self._channel.agree(steps) if s > step]
        first = self._channel.agree(self.coordinator.initial_map(step) if self.coordinator else None)
        restored = self.state.precision_map if self.restored is not None else None
        self._begin_plan(step)
        if first is not None:  # a map of the configuration replaces that of the checkpoint
            self._adopt(step, first)
        elif self._schedule.has_other_map(step, restored, self.registry.names):
            self._next_phase(step)
        elif restored is not None:
            self._adopt(step, self._channel.agree(restored))
        if not self.config.updates:
            self.state.pending = None
        pending = self.state.pending
        if pending is not None and self.coordinator is not None:
            self._submit(pending)
        started, self.kernels = time.perf_counter(), kernels
        if kernels is not None and kernels.begin():
            self._use_kernels(step, kernels, started)

    def _has_kernels(self, step: int) -> bool:
        """Return whether all ranks have their kernels. ``--snip-wait`` waits for them as for maps. Collective."""
        if self.kernels is not None:
            started = time.perf_counter()
            if not is_true_on_any(not self.kernels.finish(self.config.wait), self.device):
                self._use_kernels(step, self.kernels, started)
        return self.kernels is None

    def _use_kernels(self, step: int, kernels: WarmUp, started: float) -> None:
        """Begin to use the kernels, which all ranks have. Training has waited since ``started``. Collective."""
        self.kernels = None
        figures = kernels.complete()
        if figures:
            self._event(step, "compile", **figures, wait_s=_since(started))

    def _begin_plan(self, step: int) -> None:
        """Restore the plan of the run and what it has spent, or make the plan of a policy without statistics."""
        moved = self._schedule.begin(step)
        if moved is not None:
            self._event(step, "plan_moved", **moved)
            self._say(
                f"training now ends at step {moved['last']} instead of {moved['last_before']}: phases begin at the same"
                " fractions of the run"
            )
            if self.state.plan is not None:
                self._event(step, "plan", **self._schedule.figures(step))
        fixed = None if self.state.plan is not None else self._schedule.fixed_plan(step)
        if fixed is not None:
            self._take_plan(step, self._channel.agree(fixed))

    def _next_phase(self, step: int, measure: Measure | None = None) -> None:
        """Adopt the map of the phase that begins before ``step``. Its rise is recorded, and decides nothing."""
        started = time.perf_counter()
        new, figures = self._channel.agree(self._schedule.enter_phase(step)), dict[str, Any]()
        self._event(step, "phase", **self._schedule.figures(step))
        if measure is not None and self._changed(new):
            predicted = in_nats(self.config.policy, self.config.q) and self.config.estimator == "fisher"
            candidate = Candidate(new, self.config.policy, new.loss if predicted else None)
            with contextlib.suppress(UpdateDroppedError):
                figures = self._compare(step, [candidate], measure).fields(0)
            started = time.perf_counter()
        self._adopt(step, new, started, figures)
        self._guard.adopted(step)

    def _take_plan(self, step: int, plan: PrecisionPlan) -> None:
        self._schedule.set_plan(plan, step)
        if self.coordinator is not None and self.state.plan is not None:
            self.coordinator.record_plan(step, self.state.plan)
        self._event(step, "plan", **self._schedule.figures(step))

    def _decide_or_drop(self, step: int, pending: Pending, measure: Measure | None) -> None:
        started = time.perf_counter()
        try:
            self._decide(step, pending, measure)
        except UpdateDroppedError as dropped:
            self._drop_update(step, dropped, wait_s=_since(started))

    def _decide(self, step: int, pending: Pending, measure: Measure | None) -> None:
        """Adopt a map of the pending update if rank 0 has it. Otherwise postpone the decision by another lag.

        Candidates are measured here, before the step at which one of them is adopted. If they are rejected, a second
        solution is decided after another lag.
        """
        started = time.perf_counter()
        candidates, coordinator = None, self.coordinator
        if self._has_kernels(step):
            candidates = self._channel.agree(coordinator.decision(step, pending.version) if coordinator else None)
        if candidates is None:
            pending.due = step + self.config.lag
            self._event(step, "postpone", version=pending.version, until=pending.due, wait_s=_since(started))
            return
        self.state.pending = None
        if not candidates:
            self._event(step, "kept", version=pending.version, wait_s=_since(started))
            return
        candidate, figures = candidates[0], dict[str, Any]()
        if measure is not None:
            comparison = self._measured(step, pending, candidates, measure)
            if comparison is None:
                return
            candidate, figures = comparison.candidates[comparison.best], comparison.fields(comparison.best)
            started = time.perf_counter()
        chosen = candidate.precision_map
        refusal = self._guard.refuses(chosen)
        if refusal is not None:
            self._record_guard(step, "refused", pending.version, refusal, wait_s=_since(started))
            return
        if candidate.plan is not None and pending.phases is not None:
            self._take_plan(step, candidate.plan)
            chosen = self._schedule.enter_phase(step)
        self._adopt(step, chosen, started, figures)
        self._guard.adopted(step)

    def _measured(
        self, step: int, pending: Pending, candidates: Sequence[Candidate], measure: Measure
    ) -> Comparison | None:
        """Measure the candidates of an update. Returns their comparison if the best of them is to be adopted.

        Otherwise the update is submitted again with corrected predictions. Then the second solution is adopted, or the
        map that was rejected before, whichever is better as measured.
        """
        rejected = pending.rejected
        comparison = self._compare(step, [*candidates, *([] if rejected is None else [rejected])], measure)
        best, before = comparison.best, self.state.correction
        self.state.correction = comparison.corrected(before)
        if rejected is not None or not comparison.breaks_bound(best) or self.state.correction <= before:
            return comparison
        self._say(
            f"step {step}: no map of update {pending.version} keeps the loss within {comparison.bound:g}; solving again"
            f" with predictions x {self.state.correction:g}"
        )
        version = self.state.version + 1
        second = replace(pending, due=step + self.config.lag, version=version, rejected=comparison.candidates[best])
        self._event(step, "rejected", version=pending.version, again=version, correction=self.state.correction)
        self._send(second)
        return None

    def _compare(self, step: int, candidates: Sequence[Candidate], measure: Measure) -> Comparison:
        """Measure the rise of the loss under each candidate, and record it. Collective."""
        started = time.perf_counter()
        rises = measure([each.precision_map for each in candidates])
        comparison = Comparison(candidates, rises, self._bound)
        best, every = comparison.best, [comparison.fields(i) for i in range(len(rises))]
        version, bound = candidates[best].precision_map.version, {} if self._bound is None else {"bound": self._bound}
        self._event(step, "rise", version=version, **every[best], candidates=every, **bound, wait_s=_since(started))
        choice = f", the best of {len(rises)}" if len(rises) > 1 else ""
        self._say(f"step {step}: map {version} ({candidates[best].policy}{choice}) {comparison.line(best)}")
        return comparison

    def _take_back(self, step: int, diagnose: Diagnose | None = None) -> None:
        """Adopt the last good map again if the guard raised an alarm, which is equal on all ranks."""
        alarm, self.state.alarm = self.state.alarm, None
        if alarm is None or not self.config.updates:  # maps that the user fixed are never taken back
            return
        started = time.perf_counter()
        failed = self.registry.current
        if self.coordinator is not None:
            command = self.coordinator.blame_command(alarm.step + 1)
            self._say(f"step {alarm.step}: {alarm.reason}: to find out what is to blame, run {command}")
        if diagnose is not None:
            self._event(step, "blame", alarm_step=alarm.step, version=failed.version, **diagnose(alarm, failed),
                        wait_s=_since(started))  # fmt: skip
            started = time.perf_counter()
        good = self._guard.state.good or PrecisionMap.uniform(self.registry.names, Format.BF16)
        good = self._channel.agree(good)
        self._guard.taken_back(failed)
        self.state.plan = None  # the next update makes another one
        figures = {"back_to": good.version, "alarm_step": alarm.step, "loss": alarm.loss, "limit": alarm.limit}
        self._record_guard(step, "taken_back", failed.version, alarm.reason, **figures)
        self._adopt(step, good, started)

    def _record_guard(self, step: int, action: str, version: int, reason: str, **fields: Any) -> None:
        """Record what the guard did with a map. Rank 0 prints it."""
        self._event(step, "guard", action=action, version=version, reason=reason, **fields)
        self._say(f"step {step}: the guard has {action.replace('_', ' ')} map {version}: {reason}")

    def _adopt(
        self,
        step: int,
        new: PrecisionMap | None,
        started: float | None = None,
        measured: Mapping[str, Any] | None = None,
    ) -> None:
        """Put the map ``new`` in force from ``step`` on. ``measured`` are the fields of its measured rise."""
        assert new is not None  # it is None only until ranks have agreed on rank 0's map
        started = time.perf_counter() if started is None else started
        if self.kernels is not None:  # of a replay, or a later phase
            self.kernels.finish()
            self._use_kernels(step, self.kernels, started)
            started = time.perf_counter()
        changed = self._changed(new)
        self.registry.adopt(new)
        self.state.precision_map = new
        self.state.version = max(self.state.version, new.version)
        self._fp4_share = self._fp4_share_of(new)
        shares = format_shares(new, self._flops, self.unquantised)
        self.sink.precision_map(step, new, self.registry.names)
        if self.coordinator is not None:
            self.coordinator.record_adoption(step, new)  # before the event, whose time includes it
        self._event(
            step,
            "adopt",
            version=new.version,
            status=new.status,
            achieved=new.achieved,
            achieved_per_stage=dict(new.achieved_per_stage),
            fp4_fraction=self._fp4_share,
            formats={fmt.value: round(share, 6) for fmt, share in shares.items()},
            **new.prediction(),
            **(measured or {}),
            changed=changed,
            wait_s=_since(started),
        )
        self._tell_user(step, new)

    def _tell_user(self, step: int, precision_map: PrecisionMap) -> None:
        """Call the user's function. An exception in it, on one rank or on all, does not undo the adoption."""
        if self.on_adopt is None:
            return
        try:
            self.on_adopt(step, precision_map)
        except Exception as error:
            if not self._user_failed:
                failure = Failure.of("on_adopt", error)
                print(f"snip: step {step}: {failure}; training goes on, and no more is said of it", flush=True)
            self._user_failed = True

    def _start_update_if_due(self, steps: range, probe: Probe) -> None:
        """Start an update if one is due. Without kernels it is postponed by a lag.

        The last of ``steps`` is the next one. Training has left out those before it, and an update that was due before
        one of them starts now.
        """
        step, state = steps[-1], self.state
        is_retry, backs_off = state.postponed in steps, state.failures >= _PATIENCE and state.postponed is not None
        if not (is_retry or (any(map(self.config.is_update_step, steps)) and not backs_off)):
            return
        if self._has_kernels(step):
            state.postponed = None
            self._start_update(step, probe)
        else:
            state.postponed = step + self.config.lag
            self._event(step, "postpone", reason="kernels are being compiled", until=state.postponed)

    def _start_update(self, step: int, probe: Probe) -> None:
        """Measure the statistics, and submit them. If a part fails on a rank, all ranks drop the update."""
        if self.state.pending is not None:
            self._event(step, "skipped", reason="the previous update is still undecided")
            return
        due = step + self.config.lag
        if self.timeline is not None and due >= self.timeline.last:
            self.state.postponed = due  # of a resumed run that trains longer
            self._event(step, "skipped", reason=f"training ends before step {due}, at which its map would be adopted")
            self._say(f"step {step}: no update, because training ends before its map would be adopted, at step {due}")
            return
        phases = self._schedule.request(step, due, self.registry.current)
        started = time.perf_counter()
        try:
            result = probe(self._clip_factor())
            _check_usable(result.table)
        except UpdateDroppedError as dropped:
            self._drop_update(step, dropped, wait_s=_since(started))
            return
        seconds = _since(started)
        self.state.sequences = result.sequences
        self.sink.statistics(step, result.table, self.config)
        for kind, fields in result.events():
            self._event(step, kind, **fields)
        pending = Pending(step, due, self.state.version + 1, result.table, phases)
        first = not self.state.version
        try:
            recorded = self._send(pending)
        except UpdateDroppedError as dropped:
            self._drop_update(step, dropped, wait_s=0.0)
            return
        if first and (unreached := _unreached(result.table)):
            self._say(
                f"no gradient reaches {unreached[0]} ({len(unreached)} such linears): their errors seem to cost"
                " nothing; keep them wide with --snip-pin"
            )
        self.state.failures = 0
        recorded += sum(result.seconds.values())  # the passes have events of their own
        submitted: dict[str, Any] = {} if phases is None else {"phases": phases.as_dict()}
        submitted |= {"version": pending.version, "table_bytes": sum(a.nbytes for a in result.table.arrays.values())}
        self._event(step, "submit", **submitted, wait_s=round(_since(started) - recorded, 6), update_seconds=seconds)

    def _send(self, pending: Pending) -> float:
        """Submit an update, and make it the pending one. Returns the seconds of :meth:`_submit`. Collective.

        Raises UpdateDroppedError on all ranks if rank 0 cannot submit it.
        """
        if self.state.correction != 1.0:
            meta = {**pending.table.meta, "correction": self.state.correction}
            pending.table = replace(pending.table, meta=meta)
        recorded = Transaction(self.device).together("submission", self._submit, pending)
        self.state.version, self.state.pending = pending.version, pending
        return recorded

    def _submit(self, pending: Pending) -> float:
        """Submit an update on rank 0. Returns the seconds that have an event of their own."""
        if self.coordinator is None:
            return 0.0
        return self.coordinator.submit(pending.step, pending.table, pending.version, pending.phases)

    def _drop_update(self, step: int, dropped: UpdateDroppedError, wait_s: float) -> None:
        """Drop an update on all ranks, and set the step of the next try. Rank 0 prints the reason.

        The next try is after a lag. From the third failure in a row on, the time to the next try doubles, up to 16
        update intervals.
        """
        state = self.state
        state.failures += 1
        wait = self.config.lag * 2 ** max(0, state.failures - _PATIENCE + 1)
        state.postponed = step + min(wait, max(self.config.lag, _LONGEST * self.config.update_interval))
        if dropped.sequences is not None:
            state.sequences = dropped.sequences
        fields = {"reason": dropped.reason, **dropped.fields, "until": state.postponed, "wait_s": wait_s}
        self._event(step, "dropped", **fields)
        self._say(f"the update of step {step} is dropped: {dropped.reason}; the next try is before step"
                  f" {state.postponed}")  # fmt: skip
        if state.failures == _PATIENCE:
            self._say(
                f"{_PATIENCE} updates in a row were dropped, and the time between tries doubles from now on; training"
                " goes on under its map. If memory is short, lower --snip-settings probe_tokens or --micro-batch-size;"
                " if a statistic is not finite, look for the cause in the loss (fp16: a lower --initial-loss-scale);"
                " --snip-policy bf16 trains without updates"
            )

    def _clip_factor(self) -> float:
        """Return the factor by which gradient clipping scaled the last step's gradient; 1 if the norm is unknown."""
        norm = self.state.grad_norm
        if norm is None or self.clip_grad <= 0:
            return 1.0
        return min(1.0, self.clip_grad / (norm + 1e-6))

    # -- figures -----------------------------------------------------------------------------------------------
    def _say(self, line: str) -> None:
        if self.coordinator is not None:
            print(f"snip: {line}", flush=True)

    def _changed(self, precision_map: PrecisionMap) -> int:
        """Return how many GEMMs have another format than in the map in force."""
        names = self.registry.names
        return int((precision_map.to_codes(names) != self.registry.current.to_codes(names)).sum())

    def _fp4_share_of(self, precision_map: PrecisionMap) -> float:
        return fp4_fraction(precision_map, self._flops, self.unquantised)

    def _metric(self, figures: StepFigures | None) -> None:
        if figures is None or figures.step not in self._fp4_shares:  # the step was run by an earlier process
            return
        share = self._fp4_shares.pop(figures.step)
        self.sink.metric(figures.step, fp4_fraction=share, **figures.account)
        if self.coordinator is not None:
            self.coordinator.metric(figures, share)

    def _event(self, step: int, kind: str, /, **fields: Any) -> None:
        self.sink.event(step, kind, **fields)
        if self.coordinator is not None:
            self.coordinator.event(step, kind, **fields)


def _unreached(table: StatisticsTable) -> list[str]:
    return [row.name for row, gradient in zip(table.linears, table.linear["g2"], strict=True) if not gradient]


def _check_usable(table: StatisticsTable) -> None:
    """Raise UpdateDroppedError if a table, which is equal on all ranks, allows no choice of a map."""
    broken = table.non_finite()
    if broken:
        raise UpdateDroppedError(f"not finite: {broken[0]}", {"columns": len(broken)})
    if len(_unreached(table)) == len(table.linears):  # every option would score zero
        raise UpdateDroppedError("no gradient: the loss leaves out all tokens of the probe")


def _since(started: float) -> float:
    """Return the seconds since ``started``, a reading of ``time.perf_counter``."""
    return round(time.perf_counter() - started, 6)

"""An update as every rank runs it: probes, a statistics table, and its submission to rank 0's solver process."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.coordinator import RankZeroCoordinator
from snip_megatron.runtime.host import ProbeResult, Unmeasured
from snip_megatron.runtime.schedule_state import ScheduleState
from snip_megatron.runtime.state import ControllerState, Pending


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
        submitted |= {"version": pending.version, "table_bytes": sum(a.nbytes for a in result.table.arrays().values())}
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

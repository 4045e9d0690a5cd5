"""The request of one update to the solver: policy, candidate formats, budget, pins, and the phases that remain.

With phases, an error raises the loss at the end of training in two ways. The *standing* part is the rounding error of
the current forward. It disappears soon after the fprop runs in a precise format. It counts in full if the model is
deployed in the formats of the last phase, and in small part if it is deployed in bf16, because the weights have adapted
to the rounded forward. The *carried* part is what imprecise steps leave in the weights, more at a high learning rate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from snip_megatron.precision import GRANULARITIES, Format, Gemm, candidates_fault
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError, cut, quoted
from snip_megatron.precision.phases import Schedule
from snip_megatron.precision.strict_json import JsonFields
from snip_megatron.sensitivity.times import OptionTimes

BACKWARD_SHARE = 0.08
"""Trained loss gap of all 4-bit dgrads and wgrads divided by that of all 4-bit fprops: (.0013 − .0005) / (.0110 −
.0013), three seeds; backward-first at 67 %, uniform-fp8 and -fp4 of
``benchmarks/results/quality/compare_26m-gemm-145_h200_2026-11-21.md``.
"""

STANDING_SHARE = 0.8
"""Share of an fprop's loss that disappears once the fprop is precise.

It was fitted to runs of a 26 M model whose fprops become precise late (.82). What all-fp4 loses by the formats alone,
(.01077 − .00293), divided by the loss of its fprops, .0097, is .81.
"""

STANDING_WEIGHTS: Mapping[str, float] = {"map": 1.0, "bf16": 0.15}
"""Weight of the standing part in the last phase, by the formats in which the model is deployed.

Weights that were trained with a rounded forward lose in bf16 too, and recover within some tens of precise steps: .12 to
.2 of the standing part in runs of a 26 M model
(``benchmarks/results/quality/compare_26m-time_2xh200_2026-11-22.md`` and the runs of ``STANDING_SHARE``).
"""

_GRID = 4096  # points of the integral over a run


def carried_weights(origin: int, begins: Sequence[int], end: int, rates: Sequence[float]) -> tuple[float, ...]:
    """Return the weight κ of the carried loss of every phase.

    κ is the integral of the learning rate over the phase, divided by that over the run, so that the phases of a whole
    run sum to 1.

    Args:
        origin, end: first step of the run, and the step before which it ends.
        begins: first step of each phase, ascending, from ``origin`` on. A phase ends where the next begins.
        rates: learning rates in any unit at evenly spaced times, the first at ``origin``, the last at ``end``. A single
            one is constant. At least one is above 0.
    """
    sampled = np.resize(np.array(rates, dtype=np.float64), max(len(rates), 2))
    edges = (np.array([*begins, end], dtype=np.float64) - origin) / (end - origin)
    grid = np.union1d(np.linspace(0.0, 1.0, _GRID), edges)
    rate = np.interp(grid, np.linspace(0.0, 1.0, len(sampled)), sampled)
    carried = np.concatenate([[0.0], np.cumsum(np.diff(grid) * (rate[1:] + rate[:-1]) / 2)])
    at = np.interp(edges, grid, carried / carried[-1])
    return tuple(float(b - a) for a, b in pairwise(at))


@dataclass(frozen=True)
class PhasedRequest(JsonFields):
    """The remaining phases of a run, as plain data, which the sidecar process gets with its SolveRequest.

    All tuples have one entry per phase, in the order of time. Past phases are not included.
    """

    # first training step of each phase. The first phase may have begun earlier and counts from this step on
    begins: tuple[int, ...]
    steps: tuple[int, ...]
    # the smallest fp4 share or speedup, in the kind of the run's budget, that a phase must reach in addition to the
    # average over the run. None if only the average counts
    budgets: tuple[float | None, ...]
    # as of a :class:`snip_megatron.precision.phases.SchedulePhase`. The first entry is not used
    change: tuple[tuple[str, ...] | None, ...]
    # weight of the standing loss. It is 0 in every phase but the last (``STANDING_WEIGHTS``)
    standing: tuple[float, ...]
    # weight of the carried loss (:func:`carried_weights`): that of an option which is imprecise throughout the phase,
    # relative to one that is imprecise throughout the run
    carried: tuple[float, ...]
    spent_steps: int = 0  # number of past steps of the run, which count towards the average
    # mean fp4 share of the past steps. Under a budget of time it is their speedup, the harmonic mean
    spent: float = 0.0

    def __post_init__(self) -> None:
        count = len(self.steps)
        if not count:
            raise SnipError("phases: at least one phase must remain")
        for name in ("begins", "budgets", "change", "standing", "carried"):
            if len(getattr(self, name)) != count:
                raise SnipError(f"phases.{name}: must have one entry for each of the {count} phases")

    @classmethod
    def of_schedule(
        cls,
        schedule: Schedule,
        run: tuple[int, int],
        step: int,
        *,
        carried: Callable[[Sequence[int]], Sequence[float]],
        standing: float,
        spent_steps: int = 0,
        spent: float = 0.0,
    ) -> PhasedRequest:
        """Return the phases of ``schedule`` that remain at ``step`` of the ``run``, which is a first step and an end.

        ``carried`` maps the first steps of the remaining phases to the weights of the carried loss. ``standing`` is the
        weight of the standing loss in the last phase. The others are as the attributes.
        """
        remaining = schedule.remaining(*run, step)
        phases = [schedule.phases[index] for index, _, _ in remaining]
        begins = tuple(begin for _, begin, _ in remaining)
        return cls(
            begins,
            steps=tuple(steps for _, _, steps in remaining),
            budgets=tuple(None if phase.budget is None else phase.budget.value for phase in phases),
            change=tuple(phase.change for phase in phases),
            standing=(*[0.0] * (len(remaining) - 1), standing),
            carried=tuple(carried(begins)),
            spent_steps=spent_steps,
            spent=spent,
        )


_BUDGET = Budget("fp4", 0.75)


@dataclass(frozen=True)
class SolveRequest(JsonFields):
    """The request of one update, as plain data. The sidecar process gets it, and a run's config.json keeps it.

    Fields that a :class:`snip_megatron.runtime.config.SnipConfig` has too are those of the run.
    """

    policy: str = "snip"
    estimator: str = "fisher"
    q: str = "split"
    formats: tuple[str, ...] = ("fp8", "fp4")
    granularity: str = "gemm"
    # what the map must reach (docs/how-it-works.md, definitions). ``fp4`` is a share of the FLOPs of *all* decoder
    # linears, ``speedup`` that of the decoder's linears on the slowest pipeline stage, and ``loss`` the largest Σ of
    # scores that the fastest map may have, in the policy's unit (nats)
    budget: Budget = _BUDGET
    # how far a pipeline stage may stay below a budget of ``fp4``. None puts no constraint on stages
    stage_tolerance: float | None = 0.02
    times: OptionTimes | None = None  # predicted seconds of every GEMM. ``speedup`` and ``loss`` require them
    # (glob, format) pairs over ``<linear>`` and ``<linear>:<gemm>``. The last match wins
    pins: tuple[tuple[str, str], ...] = ()
    seed: int = 1234
    version: int = 0
    deterministic_time: float = 10.0  # CP-SAT's deterministic limit in seconds
    # pipeline stage → FLOPs per training step in decoder linears that are no candidates (MTP, experts)
    unquantised_stage_flops: Mapping[int, float] | None = None
    backward_share: float = BACKWARD_SHARE
    standing_share: float = STANDING_SHARE
    # the remaining phases of the run, over which the budget is the average. If it is None, the run has one map
    phases: PhasedRequest | None = None

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            names = ", ".join(GRANULARITIES)
            raise SnipError(f"granularity {quoted(self.granularity)}: unknown; choose one of {names}")
        for _, fmt in self.pins:
            Format(fmt)
        why = candidates_fault(self.formats, granularity=self.granularity, share=not self.budget.timed)
        if why is not None:
            raise SnipError(f"--snip-formats {cut(','.join(self.formats))}: {why}")

    @property
    def tolerance(self) -> float | None:
        return None if self.budget.timed else self.stage_tolerance

    def of_step(self, share: float) -> SolveRequest:
        """Return the request for a step with ``share`` of the tokens, with which unquantised FLOPs scale."""
        stages = self.unquantised_stage_flops
        return dataclasses.replace(self, unquantised_stage_flops=stages and {k: v * share for k, v in stages.items()})

    def formats_of(self, gemm: Gemm | None) -> tuple[str, ...]:
        """Return the candidate formats of a GEMM, or of whole linears if ``gemm`` is None."""
        if gemm is None:
            return self.formats
        return tuple(fmt for fmt in self.formats if gemm in Format(fmt).gemms)

    def lowest(self, gemm: Gemm | None) -> int:
        """Return the index in ``formats`` of the candidate with the fewest bits. Ties go to formats that are no
        variant, and then to the first. ``gemm`` is as in :meth:`formats_of`.
        """
        candidates = map(Format, self.formats_of(gemm))
        return self.formats.index(min(candidates, key=lambda fmt: (fmt.bits, fmt.base is not fmt)))

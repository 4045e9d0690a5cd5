"""The request of one update to the solver: policy, candidate formats, budget, pins."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from snip_megatron.precision import GRANULARITIES, Format, Gemm, candidates_fault
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError, cut, quoted
from snip_megatron.precision.strict_json import JsonFields
from snip_megatron.sensitivity.phased import STANDING_SHARE, PhasedRequest
from snip_megatron.sensitivity.times import OptionTimes

BACKWARD_SHARE = 0.08
"""Trained loss gap of all 4-bit dgrads and wgrads divided by that of all 4-bit fprops: (.0013 − .0005) / (.0110 −
.0013), three seeds; backward-first at 67 %, uniform-fp8 and -fp4 of
``benchmarks/results/quality/compare_26m-gemm-145_h200_2026-11-21.md``.
"""


_BUDGET = Budget("fp4", 0.75)


@dataclass(frozen=True)
class SolveRequest(JsonFields):
    """The request of one update, as plain data: it is sent to the sidecar process, and a run's config.json keeps it.

    Fields that a :class:`snip_megatron.runtime.config.SnipConfig` has too are those of the run.

    Attributes:
        budget: what the map must reach (docs/how-it-works.md, definitions): the fp4 share of the FLOPs of *all* decoder
            linears; the ``speedup`` of the decoder's linears on the slowest pipeline stage; or the largest Σ of scores
            that the fastest map may have, in the policy's unit (nats).
        stage_tolerance: how far a pipeline stage may stay below a budget of ``fp4``. None: no stage constraint.
        times: predicted seconds of every GEMM, required by ``speedup`` and ``loss``.
        pins: (glob, format) pairs over ``<linear>`` and ``<linear>:<gemm>``. The last match wins.
        deterministic_time: CP-SAT's deterministic limit in seconds.
        unquantised_stage_flops: pipeline stage → FLOPs per training step in decoder linears that are no candidates
            (MTP, experts). None if there are none.
        phases: the remaining phases of the run, over which the budget is the average. None: one map for all of it.
    """

    policy: str = "snip"
    estimator: str = "noise"
    q: str = "split"
    formats: tuple[str, ...] = ("fp8", "fp4")
    granularity: str = "gemm"
    budget: Budget = _BUDGET
    stage_tolerance: float | None = 0.02
    times: OptionTimes | None = None
    pins: tuple[tuple[str, str], ...] = ()
    seed: int = 1234
    version: int = 0
    deterministic_time: float = 10.0
    unquantised_stage_flops: Mapping[int, float] | None = None
    backward_share: float = BACKWARD_SHARE
    standing_share: float = STANDING_SHARE
    phases: PhasedRequest | None = None

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            known = ", ".join(GRANULARITIES)
            raise SnipError(f"granularity {quoted(self.granularity)}: unknown; choose one of {known}")
        for _, fmt in self.pins:
            Format(fmt)
        why = candidates_fault(self.formats, granularity=self.granularity, share=not self.budget.timed)
        if why is not None:
            raise SnipError(f"--snip-formats {cut(','.join(self.formats))}: {why}")

    @property
    def tolerance(self) -> float | None:
        return None if self.budget.timed else self.stage_tolerance

    def of_step(self, share: float) -> SolveRequest:
        """Return the request for a step with ``share`` of the tokens. Unquantised FLOPs scale with the tokens, as those
        of the candidates do.
        """
        stages = self.unquantised_stage_flops
        return dataclasses.replace(self, unquantised_stage_flops=stages and {k: v * share for k, v in stages.items()})

    def formats_of(self, gemm: Gemm | None) -> tuple[str, ...]:
        """Return the candidate formats of a GEMM, or of whole linears if ``gemm`` is None."""
        if gemm is None:
            return self.formats
        return tuple(fmt for fmt in self.formats if gemm in Format(fmt).gemms)

    def lowest(self, gemm: Gemm | None) -> int:
        """Return the index in ``formats`` of the candidate with the fewest bits: the first of equals, and no variant if
        there is another. ``gemm`` is as in :meth:`formats_of`.
        """
        own = [Format(fmt) for fmt in self.formats_of(gemm)]
        return self.formats.index(min(own, key=lambda fmt: (fmt.bits, fmt.base is not fmt)))

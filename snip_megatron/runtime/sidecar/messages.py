"""The messages between rank 0 and the sidecar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.phases import PrecisionPlan
from snip_megatron.statistics.table import StatisticsTable

if TYPE_CHECKING:
    from snip_megatron.sensitivity.request import SolveRequest


@dataclass(frozen=True)
class SolveJob:
    """One update for the sidecar.

    Attributes:
        table: the update's statistics.
        request: the solve request. The result has the same ``version``.
    """

    table: StatisticsTable
    request: SolveRequest


@dataclass(frozen=True)
class SidecarFailure:
    """The reason for which a job has no map.

    Attributes:
        kind: ``died`` (the process ended), ``exception``, ``infeasible``, ``deadline`` (no answer in time) or ``oom``.
        message: one line.
    """

    kind: str
    message: str


@dataclass(frozen=True)
class SidecarResult:
    """The outcome of one job. ``precision_map`` or ``failure`` is set.

    Attributes:
        version: the version of the request. The client sets it.
        failure: why there is no map; None if there is one.
        precision_map: the map, of a plan its first.
        plan: the plan of a request with phases.
        out_of_reach: why past steps have made the request's budget over the run impossible, so that ``plan`` has the
            highest reachable one; None if it has the request's.
        problem_json: the Problem; None if the job failed before it was built.
        scores: the scores from which the Problem was built, as the builder returned them.
        latency_s: seconds from ``submit`` to the arrival of the answer, or to the detection of the failure. The client
            sets it.
    """

    version: int = 0
    failure: SidecarFailure | None = None
    precision_map: PrecisionMap | None = None
    plan: PrecisionPlan | None = None
    out_of_reach: str | None = None
    problem_json: str | None = None
    scores: Mapping[str, Any] = field(default_factory=dict)
    latency_s: float = 0.0

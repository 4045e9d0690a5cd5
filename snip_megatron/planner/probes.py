"""What an update runs before a step: the calls of the pipeline's schedule, as the code that probes makes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from snip_megatron.planner.layout import Layout
from snip_megatron.precision import LINEAR_KINDS, LinearId
from snip_megatron.sensitivity.policies import FIXED, needs_forward_noise, needs_hessian
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.statistics.measured_schedule import Schedule, Trial, all_units, choose_units, plan_trials


@dataclass(frozen=True)
class Probes:
    """What an update runs, as the ``--snip-*`` arguments of the same names say."""

    microbatches: int = 1
    tokens: int = 512
    estimator: str = "noise"
    backward_noise: bool = False
    interval: int = 1000
    policy: str = "snip"
    measured_share: float = 0.25
    measured_twice: bool = False
    hessian_probes: int = 8

    @property
    def updates(self) -> bool:
        """Whether the policy measures at all: those with a fixed map do not."""
        return self.policy not in FIXED

    @property
    def drift(self) -> bool:
        """Whether weight divergence is measured: the forward-noise pass, gradients reduced over data parallel ranks."""
        return needs_forward_noise(self._request)

    @property
    def hessian(self) -> bool:
        """Whether Hessian traces are: two passes a probe vector."""
        return needs_hessian(self._request)

    @property
    def forces(self) -> bool:
        """Whether options are forced alone."""
        return self.drift and self.estimator == "measured"

    @property
    def _request(self) -> SolveRequest:
        return SolveRequest(policy=self.policy, estimator=self.estimator)


@dataclass(frozen=True)
class Call:
    """One call of the schedule, which fills the pipeline once.

    Attributes:
        kind: of the ``probe`` event that counts it.
        microbatches: passes of a microbatch that each rank runs in it.
    """

    kind: str
    microbatches: int


def probe_microbatches(layout: Layout, probes: Probes) -> int:
    """Microbatches a rank runs in one pass: an interleaved schedule needs whole groups of them."""
    group = _group(layout)
    return min(-(-min(probes.microbatches, layout.microbatches) // group) * group, layout.microbatches)


def calls(layout: Layout, probes: Probes, formats: Sequence[str]) -> tuple[Call, ...]:
    """All calls of one update that measures ``formats`` (without bf16), in order; without pins."""
    if not probes.updates:
        return ()
    each = probe_microbatches(layout, probes)
    found = [Call("statistics", each)]
    if probes.drift:
        found.append(Call("forward_noise", each))
    if probes.drift and probes.backward_noise:
        found.append(Call("backward_noise", each))
    if probes.hessian:
        found += [Call("hessian", each)] * (2 * probes.hessian_probes)
    for _ in range(measurements(probes)):
        found += [Call("measured", each), Call("measured", forced_passes(layout, probes, formats))]
    return tuple(found)


def microbatches_by_kind(made: Sequence[Call]) -> Mapping[str, int]:
    """Kind of ``probe`` event → its ``passes``."""
    counts: Counter[str] = Counter()
    for call in made:
        counts[call.kind] += call.microbatches
    return dict(counts)


# -- estimator measured ----------------------------------------------------------------------------------------
def measurements(probes: Probes) -> int:
    """Of one update: on the first microbatches, and on others of their own."""
    return 0 if not probes.forces else 2 if probes.measured_twice else 1


def trials(layout: Layout, probes: Probes, formats: Sequence[str]) -> tuple[Trial, ...]:
    """What one measurement forces; which units it renews differs between updates, how many does not."""
    names = [str(LinearId(layer, kind)) for layer in range(layout.model.blocks) for kind in LINEAR_KINDS]
    never = dict.fromkeys(all_units(names), -1.0)
    return plan_trials(names, formats, choose_units(never, probes.measured_share, seed=0))


def forced_passes(layout: Layout, probes: Probes, formats: Sequence[str]) -> int:
    """Microbatch passes of one measurement on each rank, the pass without any option aside."""
    seen = tuple(range(probe_microbatches(layout, probes)))
    return len(Schedule(trials(layout, probes, formats), seen, _group(layout)).slots)


def _group(layout: Layout) -> int:
    """Microbatches that Megatron's interleaved schedule takes together, where nothing else is said."""
    return layout.pp if layout.vpp > 1 else 1

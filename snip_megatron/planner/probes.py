"""The calls of the pipeline schedule that an update runs before a step, in agreement with the probing code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from snip_megatron.planner.layout import Layout
from snip_megatron.precision import LINEAR_KINDS, LinearId
from snip_megatron.sensitivity.policies import UNSOLVED, needs_forward_noise
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.statistics.measured_schedule import Schedule, Trial, all_units, choose_units, plan_trials


@dataclass(frozen=True)
class Probes:
    """The settings of an update's probes, with the meaning of the ``--snip-*`` arguments."""

    microbatches: int = 1
    tokens: int = 512
    estimator: str = "noise"
    backward_noise: bool = False
    interval: int = 1000
    policy: str = "snip"
    measured_share: float = 0.25
    measured_twice: bool = False

    @property
    def updates(self) -> bool:
        """Whether the policy measures anything. Policies with a fixed map do not."""
        return self.policy not in UNSOLVED

    @property
    def drift(self) -> bool:
        """Whether weight divergence is measured, by a forward-noise pass whose gradients are reduced over DP ranks."""
        return needs_forward_noise(self._request)

    @property
    def forces(self) -> bool:
        """Whether single options are forced (estimator ``measured``)."""
        return self.drift and self.estimator == "measured"

    @property
    def _request(self) -> SolveRequest:
        return SolveRequest(policy=self.policy, estimator=self.estimator)


@dataclass(frozen=True)
class Call:
    """One call of the pipeline schedule.

    Attributes:
        kind: the kind of the ``probe`` event that counts the call.
        microbatches: microbatches that each rank runs in the call.
    """

    kind: str
    microbatches: int


def probe_microbatches(layout: Layout, probes: Probes) -> int:
    """Return the microbatches that a rank runs in one pass. An interleaved schedule needs whole groups of them."""
    group = _group(layout)
    return min(-(-min(probes.microbatches, layout.microbatches) // group) * group, layout.microbatches)


def calls(layout: Layout, probes: Probes, formats: Sequence[str]) -> tuple[Call, ...]:
    """Return all calls of an update in order. Pins are not considered.

    Args:
        layout: the sizes.
        probes: the settings.
        formats: the formats that the update measures, without bf16.
    """
    if not probes.updates:
        return ()
    each = probe_microbatches(layout, probes)
    found = [Call("statistics", each)]
    if probes.drift:
        found.append(Call("forward_noise", each))
    if probes.drift and probes.backward_noise:
        found.append(Call("backward_noise", each))
    for _ in range(measurements(probes)):
        found += [Call("measured", each), Call("measured", forced_passes(layout, probes, formats))]
    return tuple(found)


def microbatches_by_kind(made: Sequence[Call]) -> Mapping[str, int]:
    """Return, for each kind of ``probe`` event, the number of microbatches in its field ``passes``."""
    counts: Counter[str] = Counter()
    for call in made:
        counts[call.kind] += call.microbatches
    return dict(counts)


# -- estimator measured ----------------------------------------------------------------------------------------
def measurements(probes: Probes) -> int:
    """Return the number of measurements of an update; with ``measured_twice`` a second one on other microbatches."""
    return 0 if not probes.forces else 2 if probes.measured_twice else 1


def trials(layout: Layout, probes: Probes, formats: Sequence[str]) -> tuple[Trial, ...]:
    """Return the trials of one measurement. Every update has as many trials, but of other options."""
    names = [str(LinearId(layer, kind)) for layer in range(layout.model.blocks) for kind in LINEAR_KINDS]
    never = dict.fromkeys(all_units(names), -1.0)
    return plan_trials(names, formats, choose_units(never, probes.measured_share, seed=0))


def forced_passes(layout: Layout, probes: Probes, formats: Sequence[str]) -> int:
    """Return the microbatch passes of one measurement on each rank, without the pass that forces no option."""
    seen = tuple(range(probe_microbatches(layout, probes)))
    return len(Schedule(trials(layout, probes, formats), seen, _group(layout)).slots)


def _group(layout: Layout) -> int:
    """Return the default size of the groups of microbatches in Megatron's interleaved schedule."""
    return layout.pp if layout.vpp > 1 else 1

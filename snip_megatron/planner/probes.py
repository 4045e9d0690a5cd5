"""The calls of the pipeline schedule that an update runs before a step, in agreement with the probing code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from snip_megatron.config import SnipConfig
from snip_megatron.planner.layout import Layout
from snip_megatron.sensitivity.policies import UNSOLVED, needs_forward_noise
from snip_megatron.sensitivity.request import SolveRequest


def measures(config: SnipConfig) -> bool:
    """Whether the policy measures anything. Policies with a fixed map do not."""
    return config.policy not in UNSOLVED


def weighs_updates(config: SnipConfig) -> bool:
    """Whether weight divergence is measured, by a forward-noise pass whose gradients are reduced over DP ranks."""
    return needs_forward_noise(SolveRequest(policy=config.policy, estimator=config.estimator))


@dataclass(frozen=True)
class Call:
    """One call of the pipeline schedule.

    Attributes:
        kind: the kind of the ``probe`` event that counts the call.
        microbatches: microbatches that each rank runs in the call.
    """

    kind: str
    microbatches: int


def probe_microbatches(layout: Layout, config: SnipConfig) -> int:
    """Return the microbatches that a rank runs in one pass. An interleaved schedule needs whole groups of them."""
    group = _group(layout)
    return min(-(-min(config.probe_microbatches, layout.microbatches) // group) * group, layout.microbatches)


def calls(layout: Layout, config: SnipConfig) -> tuple[Call, ...]:
    """Return all calls of an update in order."""
    if not measures(config):
        return ()
    each = probe_microbatches(layout, config)
    found = [Call("statistics", each)]
    if weighs_updates(config):
        found.append(Call("forward_noise", each))
    if weighs_updates(config) and config.backward_noise:
        found.append(Call("backward_noise", each))
    return tuple(found)


def microbatches_by_kind(made: Sequence[Call]) -> Mapping[str, int]:
    """Return, for each kind of ``probe`` event, the number of microbatches in its field ``passes``."""
    counts: Counter[str] = Counter()
    for call in made:
        counts[call.kind] += call.microbatches
    return dict(counts)


def _group(layout: Layout) -> int:
    """Return the default size of the groups of microbatches in Megatron's interleaved schedule."""
    return layout.pp if layout.vpp > 1 else 1

"""What an update of SNIP costs: the calls of the pipeline schedule that it runs, its seconds, its share of training."""

from typing import Any

from snip_megatron.planner.layout import Layout
from snip_megatron.planner.rates import Links
from snip_megatron.precision.errors import cut
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.sensitivity.policies import UNSOLVED, needs_forward_noise
from snip_megatron.sensitivity.request import SolveRequest

ASSUMPTIONS = (
    "probes: each pass is a bf16 forward and backward of a microbatch, each call fills the pipeline once; what"
    " recording adds to the statistics pass, and what capturing CUDA graphs anew takes, is not modelled; gradients go"
    " over data parallel ranks exposed",
)

_FLOAT32 = 4


def fixed_maps(config: SnipConfig) -> str:
    """Return what a training that solves for no map trains under; an empty text if it solves."""
    if config.updates:
        return ""
    given = {name: getattr(config, name) for name in ("map", "replay")}
    given["policy"] = config.policy if config.policy in UNSOLVED else None
    named = next((f"{name} {cut(value)}" for name, value in given.items() if value is not None), None)
    return "no updates: SNIP quantises no linear" if named is None else f"{named}: its map is fixed"


def probe_microbatches(layout: Layout, config: SnipConfig) -> int:
    """Return the microbatches that a rank runs in one pass. An interleaved schedule needs whole groups of them."""
    group = layout.pp if layout.vpp > 1 else 1
    return min(-(-min(config.probe_microbatches, layout.microbatches) // group) * group, layout.microbatches)


def passes(layout: Layout, config: SnipConfig) -> dict[str, int]:
    """Return kind of ``probe`` event → microbatches that a rank runs for it, each in one call of the schedule."""
    if not config.updates:
        return {}
    kinds = ["statistics"]
    if needs_forward_noise(SolveRequest(policy=config.policy, estimator=config.estimator)):
        kinds.append("forward_noise")
    return dict.fromkeys(kinds, probe_microbatches(layout, config))


def update_cost(
    layout: Layout, config: SnipConfig, links: Links, *, work: float, bf16: float, running: float
) -> dict[str, Any]:
    """Predict the cost of an update: the calls of the pipeline schedule (``passes``), the ``microbatches`` that a rank
    runs in them, ``by_kind`` of ``probe`` event; its duration in bf16 ``steps`` and in ``seconds``, of which probe
    gradients are reduced over data parallel ranks for ``reducing_seconds``; the ``share`` of training time; and what is
    ``fixed`` where there are no updates.

    ``work`` and ``bf16`` are the seconds of the slowest stage's work in a bf16 step, and of that step, ``running``
    those of a step between updates.
    """
    by_kind = passes(layout, config)
    ends = (layout.pp - 1) / layout.vpp
    passing = sum(count + ends for count in by_kind.values()) / layout.microbatches * work
    parameters = max(layout.probed_parameters(stage) for stage in range(layout.pp))
    reduced = _FLOAT32 * parameters if layout.dp > 1 and "forward_noise" in by_kind else 0
    reducing = 2.0 * (layout.dp - 1) / layout.dp * reduced / links.of(layout.tp * layout.dp)
    seconds = passing + reducing
    return {
        "passes": len(by_kind),
        "microbatches": sum(by_kind.values()),
        "by_kind": by_kind,
        "steps": seconds / bf16,
        "seconds": seconds,
        "reducing_seconds": reducing,
        "share": seconds / (seconds + config.update_interval * running) if by_kind else 0.0,
        "fixed": fixed_maps(config),
    }

"""What a probe takes on a rank, and how ranks agree whether it fits."""

import functools
from typing import Any

import pytest
import torch
from handles import handle_of

from snip_megatron.layers.context import LinearHandle, StepContext
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.planner.layout import Layout, microbatches_in_flight
from snip_megatron.planner.memory import stage_memory
from snip_megatron.planner.models import Llama
from snip_megatron.precision import DENSE_LAYER, Format, LinearId, LinearRow
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.exchange import UpdateDroppedError
from snip_megatron.runtime.host import Host
from snip_megatron.runtime.probe_memory import (
    FreeMemory,
    Need,
    fitting,
    fitting_on_all,
    needed,
    probed_shapes,
    unused_memory,
)
from snip_megatron.sensitivity.recorder import TokenShard
from snip_megatron.sensitivity.reduction import ProbeGroups

CPU = torch.device("cpu")


def handles(layers: int = 2, sizes: dict[str, tuple[int, int]] | None = None) -> list[LinearHandle]:
    shapes = sizes or dict(zip(DENSE_LAYER, [(96, 64), (64, 64), (256, 64), (64, 128)], strict=True))
    result = []
    for layer in range(layers):
        for kind, (n, k) in shapes.items():
            side = "column" if kind.endswith(("qkv", "fc1")) else "row"
            module = torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
            result.append(handle_of(LinearId("decoder", layer, kind), n, k, parallel=side, module=module))
    return sorted(result, key=lambda handle: handle.id)


def host(stage: int = 0, stages: int = 1, **fields: Any) -> Host:
    flights = functools.partial(microbatches_in_flight, stage=stage, pp=stages)
    whole: dict[str, Any] = {"groups": ProbeGroups(None, None), "device": CPU, "segments": [], "hidden": 64, **fields}
    return Host(**whole, shard=TokenShard(0, 1, True), sinks=(), local_sinks=[], in_flight=flights)


def registry(linears: list[LinearHandle], active: int = 1) -> LinearRegistry:
    names = sorted({handle.name for handle in linears})
    result = LinearRegistry([LinearRow(name, 0, 1, 1, active=active) for name in names], StepContext())
    for handle in linears:
        result.add(handle)
    return result


def test_experts_share_a_microbatch_s_tokens() -> None:
    """This rank has four of eight experts, two of them a token: each gets half of 512 tokens of the two ranks."""
    attention = handles(1)[2:]
    experts = []
    for kind, side in (("mlp.experts.linear_fc1", "column"), ("mlp.experts.linear_fc2", "row")):
        for expert in range(4):
            module = torch.nn.Linear(32, 16, bias=False, dtype=torch.bfloat16)
            fields = {"parallel": side, "module": module, "expert": expert}
            experts.append(handle_of(LinearId("decoder", 0, kind), 16, 32, **fields))
    result = probed_shapes(registry(attention + experts, active=2), host(), 512)
    assert sorted(linear.rows for linear in result.linears) == [256] * 8 + [512] * 2
    assert result.boundaries == 2
    assert result.features == 512 * (160 + 128) + 8 * 256 * (16 + 32)


def test_a_probe_needs_the_memory_that_is_planned() -> None:
    """The peak of a training pass is that of the planner's activations."""
    chosen = Layout(Llama("small", 8, 512, 1408, 8, 4, 64, 1000, 256).model(4), 1, 4, 1, 2, 256, 1, 64)
    planned = stage_memory(chosen, 0, lambda row: (Format.BF16,) * 3, SnipConfig(enabled=True))
    sizes = {LinearId.parse(name).path: (s.n, s.k) for name, s in list(chosen.shapes.items())[:4]}
    local, loop = registry(handles(sizes=sizes)), host(0, 4, tokens=256, hidden=512)
    result = needed(local, loop, SnipConfig.probe_tokens, planned["activations"], 1, chosen.microbatches)
    assert result.total == pytest.approx(planned["probe"], rel=1e-12)


def largest(sequences: int, whole: float, holes: float = 0.0) -> int:
    """Return how many sequences fit, if a sequence takes a byte in a pass and a byte when recorded."""
    return fitting(
        sequences, lambda part: Need(2.0 * sequences * part, sequences * part), FreeMemory(whole, holes, 0.0)
    ).fitting


def test_holes_hold_what_a_training_pass_had_in_them_and_nothing_else() -> None:
    for holes, count in ((4.0, 4), (8.0, 8), (1000.0, 8)):
        assert largest(8, 8.0, holes) == count
    assert largest(8, 0.9, 1000.0) == 0


def test_only_segments_and_pages_that_nothing_uses_are_whole() -> None:
    """torch's allocator describes a cached segment, one in use, one of a graph, and one that expands."""
    gib, mib = 2**30, 2**20
    blocks = [{"size": size * mib, "state": state} for size, state in ((50, "inactive"), (30, "active_allocated"))]
    plain = {"segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False, "blocks": []}
    segments: list[dict[str, Any]] = [
        plain | {"total_size": 3 * gib, "allocated_size": 0},
        plain | {"total_size": 5 * gib, "allocated_size": gib},
        plain | {"total_size": 7 * gib, "allocated_size": 0, "segment_pool_id": (1, 0)},
        plain | {"total_size": 80 * mib, "allocated_size": 30 * mib, "is_expandable": True, "blocks": blocks},
    ]
    assert unused_memory(segments) == (3 * gib + 40 * mib, 4 * gib + 10 * mib)


@pytest.mark.usefixtures("one_rank")
def test_too_little_for_one_sequence_is_said_in_words_and_figures() -> None:
    fit = fitting(4, lambda part: Need(12 * 2.0**30 * part, 0.0), FreeMemory(2.0**29, 0.0, 0.0))
    with pytest.raises(UpdateDroppedError) as dropped:
        fitting_on_all(fit, CPU)
    assert dropped.value.reason == "not enough memory: rank 0 has 0.50 GiB free, a probe may take 3.00 GiB"
    assert dropped.value.fields == {"rank": 0, "needed_bytes": 3 * 2.0**30, "free_bytes": 2.0**29}

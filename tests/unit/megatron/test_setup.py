"""What surrounds a training step. The controller is made up here; tests/distributed have the real one."""

import argparse

import pytest
from dense_names import dense_names
from handles import handle_of

from snip_megatron.layers.context import StepContext
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.megatron.setup import SnipRun
from snip_megatron.precision import LinearRow
from snip_megatron.runtime.config import SnipConfig


def test_a_step_that_megatron_repeats_rounds_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index of a backward in its step enters the keys of stochastic rounding."""
    run = SnipRun(SnipConfig(enabled=True), argparse.Namespace())
    registry = LinearRegistry([LinearRow(name, 0, 1, 1) for name in dense_names(1)], StepContext())
    handle = handle_of("decoder.layers.0.mlp.linear_fc1", context=registry.context)
    registry.add(handle)
    monkeypatch.setattr(run, "_registry", registry)
    indices: list[tuple[int, int]] = []

    def two_microbatches(*, losses: str) -> str:
        for _ in range(2):
            indices.append((registry.context.step, handle.state.backwards))
            handle.state.backwards += 1
        return losses

    registry.start_step(3)
    schedule = run.repeatable(two_microbatches, 3)
    assert [schedule(losses=name) for name in ("first", "again")] == ["first", "again"]
    assert indices == [(3, 0), (3, 1)] * 2

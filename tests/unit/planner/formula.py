"""A step model whose times follow a formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from snip_megatron.planner.layout import Layout
from snip_megatron.planner.models import ModelShape, load_model
from snip_megatron.planner.step_time import StepModel
from snip_megatron.timing.cost_model import FlopsModel

SMALL = ModelShape("small", 8, 512, 1408, 8, 4, 64, 1000, 256)


def layout(model: ModelShape | str = SMALL, **sizes: Any) -> Layout:
    """A layout with defaults for what is not said."""
    shape = load_model(model) if isinstance(model, str) else model
    given = {"tp": 1, "pp": 1, "vpp": 1, "dp": 1, "seq_length": shape.context, "micro_batch_size": 1}
    given |= sizes
    given.setdefault("global_batch_size", 8 * given["pp"] * given["micro_batch_size"] * given["dp"])
    return Layout(shape, **given)


def step_model(chosen: Layout) -> StepModel:
    """Of FLOPs."""
    return StepModel(chosen, FlopsModel())


def with_blocks(model: ModelShape, blocks: int) -> ModelShape:
    """The same with another number of blocks."""
    return replace(model, blocks=blocks)

"""A step model whose times follow a formula."""

from dataclasses import replace
from typing import Any

from snip_megatron.planner.layout import Layout
from snip_megatron.planner.models import Llama, load_llama
from snip_megatron.planner.step_time import StepModel
from snip_megatron.timing.cost_model import FlopsModel

SMALL = Llama("small", 8, 512, 1408, 8, 4, 64, 1000, 256)


def layout(llama: Llama | str = SMALL, **sizes: Any) -> Layout:
    """Return a layout with default sizes, which ``sizes`` override."""
    shape = load_llama(llama) if isinstance(llama, str) else llama
    arguments = {"tp": 1, "pp": 1, "vpp": 1, "dp": 1, "seq_length": shape.context, "micro_batch_size": 1}
    arguments |= sizes
    arguments.setdefault("global_batch_size", 8 * arguments["pp"] * arguments["micro_batch_size"] * arguments["dp"])
    return Layout(shape.model(arguments["pp"]), **arguments).checked()


def step_model(chosen: Layout) -> StepModel:
    """Return a step model whose times are those of FLOPs."""
    return StepModel(chosen, FlopsModel())


def with_blocks(model: Llama, blocks: int) -> Llama:
    """Return the model with another number of blocks."""
    return replace(model, blocks=blocks)

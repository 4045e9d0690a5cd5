"""What ``snip plan`` expects of a job."""

from __future__ import annotations

from collections.abc import Sequence

from snip_megatron.config.command_line import given_arguments
from snip_megatron.planner.layout import Layout
from snip_megatron.planner.plan import make_plan
from snip_megatron.planner.render import beaten
from snip_megatron.planner.request import DECISIVE, parse_request
from snip_megatron.planner.step_time import StepModel
from snip_megatron.timing.loading import load_cost_model

TIMINGS = "h200"
_GIB = 2.0**30


def summary(layout: Layout, arguments: Sequence[str] = ()) -> list[str]:
    """Return the layout and its forecast: two lines, and one more if a uniform format beats the map.

    Args:
        layout: the layout.
        arguments: words that hold those of SNIP, which decide the map. Phases are left out.

    Raises:
        SnipError: an argument is invalid, or the budget out of reach.
    """
    model, given = load_cost_model(TIMINGS), given_arguments(arguments)
    request = parse_request({name: given[name] for name in DECISIVE if name in given}, model)
    plan = make_plan(StepModel(layout, model), request)
    memory = plan["memory"]
    shortage = f", which do not fit into its {memory['gpu'] / _GIB:.0f}" if memory["fits"] is False else ""
    speed = ", ".join(
        f"{float(f'{step["tokens_per_second_per_gpu"]:.3g}'):,.0f} {name}" for name, step in plan["steps"].items()
    )
    return [
        f"TP {layout.tp} × PP {layout.pp} × DP {layout.dp} = {layout.ranks} GPUs; {layout.microbatches} microbatches of"
        f" {layout.tokens} tokens",
        f"expected on {plan['timings']} ({request.budget} over {','.join(request.formats)}):"
        f" {memory['peak'] / _GIB:.0f} GiB a GPU{shortage}; tokens/s a GPU: {speed}",
        *(line for line in [beaten(plan)] if line),
    ]

"""What ``snip plan`` expects of a layout, for a dry run of ``snip launch``."""

from __future__ import annotations

from snip_megatron.planner.layout import Layout

TIMINGS, BUDGET = "h200", "fp4=0.75"
_GIB = 2.0**30


def summary(layout: Layout) -> str:
    """Return the layout and its forecast under the budget of ``snip launch``, as two lines. Raises SnipError."""
    from snip_megatron.planner.plan import make_plan
    from snip_megatron.planner.probes import Probes
    from snip_megatron.planner.request import parse_request
    from snip_megatron.planner.step_time import StepModel
    from snip_megatron.timing.loading import load_cost_model

    model = load_cost_model(TIMINGS)
    request = parse_request(BUDGET, None, model.formats, granularity="gemm", tolerance=0.02, statistics=None, seed=1)
    plan = make_plan(StepModel(layout, model), request, Probes(1, 512, "noise", False, 1000))
    memory = plan["memory"]
    shortage = f", which do not fit into its {memory['gpu'] / _GIB:.0f}" if memory["fits"] is False else ""
    speed = ", ".join(
        f"{float(f'{step["tokens_per_second_per_gpu"]:.3g}'):,.0f} {name}" for name, step in plan["steps"].items()
    )
    return (
        f"TP {layout.tp} × PP {layout.pp} × DP {layout.dp} = {layout.ranks} GPUs; {layout.microbatches} microbatches of"
        f" {layout.tokens} tokens\n"
        f"expected on {plan['timings']} ({BUDGET}): {memory['peak'] / _GIB:.0f} GiB a GPU{shortage};"
        f" tokens/s a GPU: {speed}"
    )

"""What ``snip plan`` expects of a layout, for a dry run of ``snip launch``."""

from __future__ import annotations

from snip_megatron.planner.layout import Layout

TIMINGS = "h200"
_GIB = 2.0**30


def summary(layout: Layout, budget: str | None = None, formats: str | None = None) -> str:
    """Return the layout and its forecast as lines: two, and one more if a uniform format beats the map.

    Args:
        layout: the layout.
        budget: the value of ``--snip-budget``; None for the default.
        formats: the value of ``--snip-formats``, likewise.

    Raises:
        SnipError: the budget is invalid or out of reach.
    """
    from snip_megatron.config.defaults import backend_of
    from snip_megatron.planner.plan import make_plan
    from snip_megatron.planner.probes import Probes
    from snip_megatron.planner.render import beaten
    from snip_megatron.planner.request import parse_request
    from snip_megatron.planner.step_time import StepModel
    from snip_megatron.timing.loading import load_cost_model

    model = load_cost_model(TIMINGS)
    request = parse_request(
        budget, formats, model.formats, backend=backend_of(model), granularity="gemm", tolerance=0.02, statistics=None,
        seed=1,
    )  # fmt: skip
    plan = make_plan(StepModel(layout, model), request, Probes(1, 512, "noise", False, 1000))
    memory = plan["memory"]
    shortage = f", which do not fit into its {memory['gpu'] / _GIB:.0f}" if memory["fits"] is False else ""
    speed = ", ".join(
        f"{float(f'{step["tokens_per_second_per_gpu"]:.3g}'):,.0f} {name}" for name, step in plan["steps"].items()
    )
    return (
        f"TP {layout.tp} × PP {layout.pp} × DP {layout.dp} = {layout.ranks} GPUs; {layout.microbatches} microbatches of"
        f" {layout.tokens} tokens\n"
        f"expected on {plan['timings']} ({request.text} over {','.join(request.formats)}):"
        f" {memory['peak'] / _GIB:.0f} GiB a GPU{shortage};"
        f" tokens/s a GPU: {speed}" + "".join(f"\n{line}" for line in [beaten(plan)] if line)
    )

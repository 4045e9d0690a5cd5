"""Forecasts of ``snip plan`` for the known configurations, as the table of ``launch/README.md``.

``python -m snip_megatron.launch.figures launch/README.md`` writes the table between its marks. With ``--check`` nothing
is written, and the exit code says whether the table is up to date.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from snip_megatron.errors import SnipError
from snip_megatron.launch.configurations import CONFIGURATIONS, Configuration
from snip_megatron.launch.job import Wishes, make_job
from snip_megatron.planner.layout import Layout
from snip_megatron.records.output_file import deliver

BEGIN, END = "<!-- figures: python -m snip_megatron.launch.figures launch/README.md -->", "<!-- end of figures -->"
TIMINGS, BUDGET = "h200", "fp4=0.75"
_GIB = 2.0**30


def expected(layout: Layout) -> dict[str, Any]:
    """Return the plan of a layout under the budget of ``snip launch``. Raises SnipError."""
    from snip_megatron.planner.plan import make_plan
    from snip_megatron.planner.probes import Probes
    from snip_megatron.planner.question import parse_question
    from snip_megatron.planner.step_time import StepModel
    from snip_megatron.timing.loading import load_cost_model

    model = load_cost_model(TIMINGS)
    question = parse_question(BUDGET, None, model.formats, granularity="gemm", tolerance=0.02, statistics=None, seed=1)
    return make_plan(StepModel(layout, model), question, Probes(1, 512, "noise", False, 1000))


def memory(plan: dict[str, Any]) -> float:
    """GiB of the GPU that needs most memory, probes included."""
    return float(plan["memory"]["peak"]) / _GIB


def rates(plan: dict[str, Any]) -> dict[str, float]:
    """Tokens per second and GPU in bf16, in fp8 and under the map."""
    return {name: float(step["tokens_per_second_per_gpu"]) for name, step in plan["steps"].items()}


def summary(layout: Layout) -> str:
    """Return the layout and its forecast as two lines for a terminal."""
    plan = expected(layout)
    speed = ", ".join(f"{_three_digits(rate)} {name}" for name, rate in rates(plan).items())
    return (
        f"TP {layout.tp} × PP {layout.pp} × DP {layout.dp} = {layout.ranks} GPUs; {layout.microbatches} microbatches of"
        f" {layout.tokens} tokens\n"
        f"expected on {plan['timings']} ({BUDGET}): {memory(plan):.0f} GiB a GPU{_shortage(plan)};"
        f" tokens/s a GPU: {speed}"
    )


def _shortage(plan: dict[str, Any]) -> str:
    found = plan["memory"]
    return f", which do not fit into its {found['gpu'] / _GIB:.0f}" if found["fits"] is False else ""


def _row(configuration: Configuration) -> str:
    layout = make_job(Wishes(configuration.name, data="mock", save=Path("checkpoints"), resume=False)).layout
    plan = expected(layout)
    speed = rates(plan)
    total = speed["map"] * layout.ranks
    cells = [
        f"`{configuration.name}`",
        f"{configuration.title}, {plan['model']['parameters'] / 1e9:.2f} B",
        f"{configuration.nodes} × 8 {plan['timings'].removeprefix('NVIDIA ')}",
        f"{layout.tp} × {layout.pp} × {layout.dp}",
        f"{layout.global_batch_size} × {layout.seq_length}",
        f"{memory(plan):.0f}",
        *(_three_digits(speed[name]) for name in ("bf16", "fp8", "map")),
        _three_digits(total),
    ]
    return "| " + " | ".join(cells) + " |"


def _three_digits(value: float) -> str:
    """Format ``value`` with three significant digits."""
    return f"{float(f'{value:.3g}'):,.0f}"


def table() -> str:
    """Return the table in Markdown with its marks."""
    columns = ["configuration", "model", "nodes × GPUs", "TP × PP × DP", "batch × tokens", "GiB a GPU"]
    columns += ["bf16", "fp8", "map", "map, whole job"]
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    rows = "\n".join(_row(configuration) for configuration in CONFIGURATIONS.values())
    return f"{BEGIN}\n{head}\n{rows}\n{END}"


def renewed(page: str) -> str:
    """Return ``page`` with its table replaced. Raises SnipError if the page has no marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SnipError(f"the page has no marks {BEGIN} and {END}")
    return before + table() + after


def main(argv: list[str] | None = None) -> int:
    """Update the page.

    Returns:
        Exit code 0 if the table was written or is up to date, 1 if ``--check`` found an old table, 2 on an error.
    """
    parser = argparse.ArgumentParser(prog="python -m snip_megatron.launch.figures")
    parser.add_argument("page", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    try:
        page = args.page.read_text(encoding="utf-8")
        text = renewed(page)
        if args.check:
            return int(text != page)
        deliver("page", args.page, text)
    except (OSError, SnipError) as error:
        print(f"figures: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

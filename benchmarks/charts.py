"""Draws the charts of docs/results from the committed result files: docs/images/<chart>.svg.

    python -m benchmarks.charts [--check]

``--check`` writes nothing. The exit code is then 1 if a committed chart is not what the results say.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import maps
from benchmarks.common import ROOT
from benchmarks.quality import pareto
from benchmarks.quality.gaps import policy_rows
from benchmarks.svg import Bar, bar_chart

RESULTS, IMAGES = ROOT / "benchmarks/results", ROOT / "docs/images"
SNIP = "snip_default_graphs"
CONTENDERS = {
    "bf16": "BF16",
    "bf16_graphs": "BF16, CUDA graphs",
    "te_fp8_block": "Megatron's FP8, blockwise",
    "te_fp8_block_graphs": "Megatron's FP8, blockwise, CUDA graphs",
    "te_fp8_tensor": "Megatron's FP8, tensorwise",
    "te_fp8_tensor_graphs": "Megatron's FP8, tensorwise, CUDA graphs",
    "snip_fp8_tensor_graphs": "fp8_tensor in every linear",
    SNIP: "--snip",
}
DENSE = {
    "Llama of 1.1 B, H100": "job_1b-default-kernels_h100_2026-11-26",
    "Llama of 1.1 B, H200": "job_1b-default_h200_2026-11-26",
    "four blocks of Llama 8B, H100": "job_8b-blocks-default_h100_2026-11-26",
    "four blocks of Llama 8B, H200": "job_8b-blocks-default_h200_2026-11-26",
}
MIXTURES = {
    "like Qwen3-30B-A3B, H100": ("job_qwen3-moe_h100_2026-11-26", "job_qwen3-moe-blockwise_h100_2026-11-26"),
    "like Qwen3-30B-A3B, H200": ("job_qwen3-moe_h200_2026-11-30", "job_qwen3-moe-deepgemm_h200_2026-11-26"),
    "like Qwen3-30B-A3B, experts on two H100": ("job_qwen3-moe-ep2_2xh100_2026-11-26",),
    "like Qwen3-30B-A3B, experts on two H200": ("job_qwen3-moe-ep2_2xh200_2026-11-30",),
    "like DeepSeek, H100": ("job_deepseek-moe_h100_2026-11-26", "job_deepseek-moe-tensorwise_h100_2026-11-26"),
    "like DeepSeek, H200": ("job_deepseek-moe-deepgemm_h200_2026-11-27",),
}
MAPS = {
    "26 M, FP4 over FP8, 75 %": (
        "compare_26m-gemm_h200_2026-11-21",
        0.75,
        ("snip", "backward-first", "fisher", "random"),
    ),
    "26 M, NVFP4 over MXFP8, 87.5 %": (
        "compare_26m-nvfp4_2xh200_2026-11-23",
        0.875,
        ("nvidia", "snip, static", "snip, auto"),
    ),
    "1.1 B after 16.4 M tokens, FP4 over FP8, 80 %": (
        "compare_1b-later_2xh200_2026-11-27",
        0.8,
        ("snip, static", "backward-first"),
    ),
}
SCHEDULES = {
    "26 M": "compare_26m-time_2xh200_2026-11-22",
    "125 M": "compare_125m-time_2xh200_2026-11-23",
}
SCHEDULED = {"snip, auto": "auto", "late-forward": "late-forward", "snip, static": "one map"}
UPDATES = {
    "1.1 B, H100": "job_1b-default-cold_h100_2026-11-26",
    "1.1 B, H200": "job_1b-default_h200_2026-11-26",
    "8B blocks, H100": "job_8b-blocks-default_h100_2026-11-26",
    "8B blocks, H200": "job_8b-blocks-default_h200_2026-11-26",
    "Qwen3's mixture, H100": "job_qwen3-moe_h100_2026-11-26",
    "Qwen3's mixture, H200": "job_qwen3-moe_h200_2026-11-30",
    "DeepSeek's mixture, H100": "job_deepseek-moe_h100_2026-11-26",
    "DeepSeek's mixture, H200": "job_deepseek-moe_h200_2026-11-30",
}
PLANNED = {
    "1b_h100": "1.1 B, H100",
    "1b_h200": "1.1 B, H200",
    "8b-blocks_h100": "8B blocks, H100",
    "8b-blocks_h200": "8B blocks, H200",
    "8b-blocks-4k-tp2": "8B blocks, 75 % FP4, tensor parallel, two H200",
    "8b-blocks-4k-dp2": "8B blocks, 75 % FP4, data parallel, two H200",
    "8b-blocks-4k-pp2": "8B blocks, 75 % FP4, pipeline parallel, two H200",
}


def result(path: str) -> Any:
    """Return the content of ``benchmarks/results/<path>.json``."""
    return json.loads((RESULTS / f"{path}.json").read_text(encoding="utf-8"))


def bf16_ms(job: Any) -> float:
    """Return the milliseconds of a job's fastest step in bf16."""
    return min(ms for name, ms in job["ms"].items() if name.startswith("bf16"))


def _steps(group: str, file: str) -> Iterator[Bar]:
    """Yield a bar for each contender of a job: its speed over the fastest step in bf16."""
    job = result(f"jobs/{file}")
    for name, title in CONTENDERS.items():
        if name in job["ms"]:
            ms = job["ms"][name]
            speed = bf16_ms(job) / ms
            yield Bar(group, title, speed, f"{speed:.2f}× ({ms:.0f} ms)", file, name == SNIP)


def dense_speed() -> str:
    """Speeds of dense trainings."""
    bars = [bar for group, file in DENSE.items() for bar in _steps(group, file)]
    return bar_chart("Speed of a step over the fastest in BF16 (milliseconds)", bars)


def mixtures() -> str:
    """Speeds of mixtures. Megatron's FP8 may stand in a job of its own, with its own bf16."""
    bars = []
    for group, (file, *rivals) in MIXTURES.items():
        of_rivals = [bar for rival in rivals for bar in _steps(group, rival) if bar.name.startswith("Megatron")]
        bars += (*_steps(group, file), *of_rivals)
    return bar_chart("Speed of a step over the fastest in BF16 of its job (milliseconds)", bars)


def _recovered(file: str, budget: float | None, label: str) -> float:
    (row,) = [r for r in policy_rows(RESULTS / f"quality/{file}.json") if (r.label, r.budget) == (label, budget)]
    return statistics.fmean(row.recovered["map"].values())


def quality_of_maps() -> str:
    """Recovered shares of policies that place four bits once, and of ``auto``."""
    bars = []
    for group, (file, budget, labels) in MAPS.items():
        for label in labels:
            share = _recovered(file, None if label == "nvidia" else budget, label)
            bars.append(
                Bar(group, pareto.NAMES.get(label, label), share, f"{share:.3f}", file, label.startswith("snip"))
            )
    return bar_chart("Share of FP4's loss that a policy recovers", bars)


def when_to_switch() -> str:
    """Recovered shares of schedules at three budgets."""
    bars = []
    for model, file in SCHEDULES.items():
        for budget in (0.8, 0.9, 0.95):
            for label, name in SCHEDULED.items():
                share = _recovered(file, budget, label)
                bars.append(Bar(f"{model}, {100 * budget:g} % FP4", name, share, f"{share:.3f}", file, name == "auto"))
    return bar_chart("Share of FP4's loss that a schedule recovers", bars)


def cost() -> str:
    """Seconds that the first and the second update add to the training."""
    bars = []
    for group, file in UPDATES.items():
        (updates,) = result(f"jobs/{file}")["updates"].values()
        for name, update in zip(("first update", "later update"), updates, strict=False):
            seconds = update["longer_s"]
            bars.append(Bar(group, name, seconds, f"{seconds:.1f} s", file, name == "later update"))
    return bar_chart("Seconds by which an update makes its steps longer", bars)


def predictions() -> str:
    """Speedups that ``snip plan`` predicts, beside measured ones."""
    bars = []
    for name, group in PLANNED.items():
        file = f"plan_job_{name}_2026-11-26"
        rows = {row["contender"]: row["speedup"] for row in result(f"planner/{file}")["rows"]}
        row = rows.get(SNIP) or rows["snip_fp4_75_graphs"]
        bars += [
            Bar(group, kind, row[kind], f"{row[kind]:.2f}×", file, kind == "measured")
            for kind in ("predicted", "measured")
        ]
    return bar_chart("Speedup over BF16: predicted by snip plan, and measured", bars)


def formats() -> str:
    """Speeds of one linear by format."""
    linear, emulated = "linear_llama-8b-70b_h200_2026-11-25", "formats_variants_h200_2026-11-24"
    body, group = result(f"layers/{linear}"), "FP8 tensor cores of an H200 (geometric mean of 15 shapes)"
    bars = [Bar(group, f"{n}, SNIP", v, f"{v:.2f}×", linear, True) for n, v in body["geomean"].items()]
    bars += [Bar(group, f"{n}, Transformer Engine", v, f"{v:.2f}×", linear) for n, v in body["geomean_te"].items()]
    speeds = [row["speed"] for row in result(f"kernels/{emulated}")["speeds"]]
    for name in speeds[0]:
        if name.startswith("emulated") and "eden" not in name:
            value, group = statistics.geometric_mean(row[name] for row in speeds), "emulated on an H200 (three shapes)"
            bars.append(Bar(group, name.removeprefix("emulated_"), value, f"{value:.2f}×", emulated, True))
    return bar_chart("Speed of a linear with quantisation over BF16", bars)


def links() -> str:
    """Step times of two data parallel ranks over each link."""
    file = "links_2xh100_2026-11-26"
    names = {
        "bf16": "BF16, gradients in FP32",
        "bf16, gradients bf16": "BF16, gradients in BF16",
        "fp8": "SNIP, fp8, gradients in FP32",
        "fp8, gradients fp8": "SNIP, fp8, gradients in FP8",
    }
    bars = []
    for link, body in result(f"jobs/{file}")["links"].items():
        for contender, name in names.items():
            if "ms" in body.get("dp2", {}).get(contender, {}):
                ms, group = body["dp2"][contender]["ms"], f"{link}, {body['all_reduce_gb_s']:.1f} GB/s"
                bars.append(Bar(group, name, ms, f"{ms:.0f} ms", file, name.startswith("SNIP")))
    return bar_chart("Milliseconds of a step on two H100", bars)


def reliability() -> str:
    """Outcomes of injected faults."""
    file = "faults_cpu_2026-11-21"
    outcomes = Counter(each["outcome"] for each in result(f"reliability/{file}")["results"])
    bars = [Bar("", name, count, str(count), file, True) for name, count in outcomes.most_common()]
    return bar_chart("Outcomes of 200 faults; none lost a step", bars)


CHARTS: dict[str, Callable[[], str]] = {
    "pareto": lambda: pareto.picture(list(pareto.measured()), list(pareto.forecast())),
    "maps": maps.picture,
    "dense-speed": dense_speed,
    "mixtures": mixtures,
    "quality-of-maps": quality_of_maps,
    "when-to-switch": when_to_switch,
    "cost": cost,
    "predictions": predictions,
    "formats": formats,
    "links": links,
    "reliability": reliability,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the charts, or check them. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Draw the charts of docs/results from committed results")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a chart is not what the results say")
    arguments = parser.parse_args(argv)
    stale = []
    for name, draw in CHARTS.items():
        file, drawn = IMAGES / f"{name}.svg", draw()
        if not arguments.check:
            file.write_text(drawn, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != drawn:
            stale.append(file.name)
    if stale:
        print(f"not what the results say: {', '.join(stale)}; python -m benchmarks.charts", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())

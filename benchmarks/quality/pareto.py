"""Draws what a policy costs in loss against what it saves in time: docs/images/pareto.svg, from committed results.

No run has both axes: losses are gaps to bf16 of small models (``compare``), and step times those of larger ones.

- *Hopper*: step times of a 1.1 B training that ``benchmarks.job`` measured, each over bf16 of its own file. A dashed
  line has no loss: Megatron's own FP8 is trained by no comparison.
- *Blackwell*: a forecast of ``snip plan --model 8b --dp 8 --global-batch-size 64 --micro-batch-size 1 --seq-length 8192
  --timings flops --formats mxfp8,nvfp4 --budget fp4=1``. Its rates are stated: 8 bits are twice as fast as bf16, 4 bits
  four times, and quantisation is free, so that times lie too low. The losses are of emulated formats.

``python -m benchmarks.charts`` writes the picture. Every point names its files in its tooltip.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.common import ROOT
from benchmarks.quality.gaps import Gap, gap, policy_rows
from benchmarks.svg import OTHER, OWN, document, line, text

RESULTS = ROOT / "benchmarks/results"
FORECAST = "planner/forecast_8b-rates_2026-11-26.json"
HOPPER = {
    "bf16": ("jobs/job_1b-default_h100_2026-11-26.json", "bf16_graphs", "bf16"),
    "fp8 everywhere": ("jobs/job_1b-swiglu_h200_2026-11-25.json", "snip_fp8_fused_graphs", "uniform-fp8"),
    "fp8_tensor everywhere": ("jobs/job_1b-default_h100_2026-11-26.json", "snip_fp8_tensor_graphs", "fp8_tensor"),
    "--snip": ("jobs/job_1b-default_h100_2026-11-26.json", "snip_default_graphs", "default"),
    "Megatron's tensorwise FP8": ("jobs/job_1b-default_h100_2026-11-26.json", "te_fp8_tensor_graphs", None),
    "Megatron's blockwise FP8": ("jobs/job_1b-default_h100_2026-11-25.json", "te_fp8_block_graphs", None),
}
"""Policy → result with its time, its contender there, its label in the comparisons of losses."""
LOSSES = {
    "26M": "quality/compare_26m-default_h200_2026-11-26.json",
    "125M": "quality/compare_125m-default_h100-h200_2026-11-26.json",
}
NVFP4 = "quality/compare_26m-nvfp4_2xh200_2026-11-23.json"
OURS = ("snip, auto", "snip, static", "--snip")
NAMES = {
    "uniform-fp8": "mxfp8 everywhere",
    "uniform-fp4": "nvfp4 everywhere",
    "nvidia": "NVIDIA's recipe",
    "mxfp8-forward": "mxfp8 forward, nvfp4 backward",
    "snip, auto": "snip, auto",
    "snip, static": "snip, one map",
    "backward-first": "backward first",
}
KEPT_BF16 = {"bf16": 1.0, "nvidia": 0.125}
"""Share of the FLOPs that a policy of the NVFP4 comparison runs in bf16; 0 for others."""
LABELS = {"fp8_tensor everywhere": (0, -8), "--snip": (0, 6), "snip, auto": (-1, 16), "snip, one map": (0, -4)}
"""Name of a line → the point that it stands beside, by time, and how many pixels lower."""
FEWEST = 4
"""Runs of a point."""


@dataclass(frozen=True)
class Point:
    """A policy: step time over that of bf16, and gap in mnat, None if no loss was measured."""

    name: str
    share: str
    time: float
    gap: Gap | None
    model: str
    ours: bool
    files: tuple[str, ...]


def measured() -> Iterator[Point]:
    """Yield the points of Hopper."""
    gaps: dict[tuple[str, str], tuple[Gap, str]] = {}
    for model, name in LOSSES.items():
        path = RESULTS / name
        gaps |= {
            (model, row.label): (gap(row), path.name) for row in policy_rows(path) if len(row.gap["map"]) >= FEWEST
        }
    for name, (job, contender, label) in HOPPER.items():
        ms = json.loads((RESULTS / job).read_text())["ms"]
        time = ms[contender] / ms.get("bf16_graphs", ms.get("bf16"))
        points = {model: gaps[model, label] for model in LOSSES if label is not None and (model, label) in gaps}
        for model, (value, file) in points.items():
            yield Point(name, "", time, value, model, name in OURS, (Path(job).name, file))
        if not points:
            yield Point(name, "", time, None, "", name in OURS, (Path(job).name,))


def forecast() -> Iterator[Point]:
    """Yield the points of Blackwell."""
    plan, losses = RESULTS / FORECAST, RESULTS / NVFP4
    bf16, eight, four = (json.loads(plan.read_text())["steps"][name]["seconds"] for name in ("bf16", "fp8", "map"))
    for row in policy_rows(losses):
        if len(row.gap["map"]) >= FEWEST and (row.label in NAMES or row.label == "bf16"):
            bf16_share = KEPT_BF16.get(row.label, 0.0)
            seconds = bf16_share * bf16 + row.share * four + (1.0 - bf16_share - row.share) * eight
            share = "" if row.budget is None else f"{100 * row.budget:g} % fp4"
            files, name = (plan.name, losses.name), NAMES.get(row.label, row.label)
            yield Point(name, share, seconds / bf16, gap(row), "26M", row.label in OURS, files)


# -- drawing ----------------------------------------------------------------------------------------------------------
WIDE, HIGH, LEFT, TOP, BESIDE = 400, 300, 62, 54, 60
"""Size of a panel, its place, and what is left between two panels, in pixels."""


class Panel:
    """One pair of axes with its left edge at the pixel ``left``, from ``least`` to ``last`` and from 0 to ``most``."""

    def __init__(self, left: int, title: str, under: str, times: tuple[float, float], most: float) -> None:
        self.left, self.times, self.most = left, times, most
        self.parts = [text(left, 22, title, weight="bold"), text(left, 40, under, size=11)]
        self.parts.append(f'<rect x="{left}" y="{TOP}" width="{WIDE}" height="{HIGH}" fill="none" stroke="#d0d7de"/>')
        for i in range(5):
            time, value = times[0] + (times[1] - times[0]) * i / 4, most * i / 4
            y = self.y(value)
            self.parts.append(text(self.x(time), TOP + HIGH + 16, f"{time:.2f}", anchor="middle", size=11))
            self.parts.append(f'<line x1="{left}" x2="{left + WIDE}" y1="{y}" y2="{y}" stroke="#eaeef2"/>')
            self.parts.append(text(left - 6, y + 4, f"{value:g}", anchor="end", size=11))

    def x(self, time: float) -> float:
        """Return the pixel of a time over bf16's."""
        return round(self.left + WIDE * (time - self.times[0]) / (self.times[1] - self.times[0]), 1)

    def y(self, value: float) -> float:
        """Return the pixel of a gap in mnat."""
        return round(TOP + HIGH * (1.0 - (value / self.most + 0.06) / 1.12), 1)

    def draw(self, points: Sequence[Point]) -> None:
        """Draw the points of a policy and a model as a line with intervals, without a loss as a dashed line."""
        series: dict[tuple[str, str], list[Point]] = {}
        for point in sorted(points, key=lambda point: point.time):
            series.setdefault((point.name, point.model), []).append(point)
        for (name, model), members in series.items():
            colour = OWN if members[0].ours else OTHER
            if members[0].gap is None:
                x = self.x(members[0].time)
                self.parts.append(line(x, TOP, x, TOP + HIGH, colour, "3 4"))
                turned = f'transform="rotate(-90 {x - 4} {TOP + 6})"'
                self.parts.append(text(x - 4, TOP + 6, name, turned, anchor="end", size=10.5, colour=colour))
                continue
            places = [(self.x(point.time), self.y(point.gap.mean)) for point in members if point.gap is not None]
            self.parts += [line(*a, *b, colour) for a, b in itertools.pairwise(places)]
            self.parts += [self._point(point, colour) for point in members]
            if model == "26M":
                index, down = LABELS.get(name, (0, 4))
                (x, y), edge = places[index], self.left + 0.85 * WIDE
                x, anchor = (x - 8, "end") if places[index][0] > edge else (x + 8, "start")
                self.parts.append(text(x, y + down, name, anchor=anchor, size=10.5, colour=colour))

    def _point(self, point: Point, colour: str) -> str:
        assert point.gap is not None
        x, y, fill = self.x(point.time), self.y(point.gap.mean), colour if point.model == "26M" else "white"
        tooltip = f"{point.name} {point.share}: {point.time:.3f} of bf16's step, {point.gap} mnat ({point.model},"
        tooltip += f" {point.gap.runs} runs); {', '.join(point.files)}"
        interval = line(x, self.y(point.gap.low), x, self.y(point.gap.high), colour)
        circle = f'<circle cx="{x}" cy="{y}" r="4" fill="{fill}" stroke="{colour}" stroke-width="1.5"/>'
        return f"<g><title>{escape(tooltip)}</title>{interval}{circle}</g>"


def picture(hopper: Sequence[Point], blackwell: Sequence[Point]) -> str:
    """Return the SVG."""
    beside = LEFT + WIDE + BESIDE
    under = "step times measured at 1.1 B; losses at 26M ● and 125M ○"
    left = Panel(LEFT, "Hopper", under, (0.76, 1.0), 1.0)
    under = "step times of 8 B by stated rates; losses at 26M, emulated"
    right = Panel(beside, "Blackwell: a forecast", under, (0.54, 0.78), 8.0)
    left.draw(hopper)
    right.draw([point for point in blackwell if point.time < right.times[1]])
    middle, bottom = TOP + HIGH / 2, TOP + HIGH + 36
    axes = [text(edge + WIDE / 2, bottom, "time of a step over bf16's", anchor="middle") for edge in (LEFT, beside)]
    axes.append(text(16, middle, "loss over bf16's, mnat", f'transform="rotate(-90 16 {middle})"', anchor="middle"))
    return document(beside + WIDE + 20, bottom + 14, [*left.parts, *right.parts, *axes])

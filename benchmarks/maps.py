"""Draws what SNIP measures and what it chooses, by layer and GEMM: docs/images/maps.svg.

    python -m benchmarks.maps RUN --format nvfp4 --out benchmarks/results/quality/map_<what>_<hardware>_<date>.json

The command keeps of a run directory what the picture needs: the latest map, and each GEMM's harm in one format, its
score Q. ``python -m benchmarks.charts`` draws the picture from such a file, from the recorded run and from a job,
whose result has the number of layers by GEMM and format, but no harm.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import ROOT, header, write
from benchmarks.svg import OTHER, OWN, document, text
from snip_megatron.precision.linears import split_option_id
from snip_megatron.reporting.figures import FORMAT_COLOURS
from snip_megatron.runtime.run_data import Adoption, load_run

RESULTS = ROOT / "benchmarks/results"
RECORDED = ROOT / "examples/recorded_run"
MIXTURE = "jobs/job_qwen3-moe-deepgemm_h200_2026-11-26.json"
EXPERTS = "layers/experts-e128_h200_2026-11-27.json"
REHEARSAL = "quality/map_nvfp4-rehearsal_cpu_2026-11-29.json"
COLOURS = {fmt.value: colour for fmt, colour in FORMAT_COLOURS.items()}
SHADES = ("#fdf3ec", "#fbd5bd", "#f39f75", "#d65a3c", "#8c1d18")
BOUNDS = (1e-7, 1e-6, 1e-5, 1e-4)
"""Colours of harm, and the nats at which the next one begins."""
LABELS, GRID, GAP, ROW, HEIGHT = 150, 208, 24, 13, 171
"""Widths of the names, of a grid and of the gap beside it, height of a row and of a grid, in pixels."""

type Grid[T] = dict[str, list[T]]
"""``<path of the linear>:<gemm>`` → a value for each layer."""


@dataclass(frozen=True)
class Model:
    """A column of the picture: what it is, what is measured, what is chosen.

    ``bars`` are milliseconds by name, for a model without harm in its result file.
    """

    title: str
    what: str
    measured: str
    chosen: str
    formats: Grid[str]
    harm: Grid[float] | None = None
    bars: Mapping[str, float] | None = None


def grids(adoption: Adoption, fmt: str) -> tuple[Grid[str], Grid[float]]:
    """Return the formats of a map, and the harm of each GEMM in the format ``fmt``."""
    assert adoption.precision_map is not None
    assert adoption.scores is not None
    formats: Grid[str] = {}
    harm: Grid[float] = {}
    for key, choice in adoption.precision_map.choices.items():
        kind = f"{split_option_id(key)[0].path}:{key.rpartition(':')[2]}"
        formats.setdefault(kind, []).append(choice.value)
        harm.setdefault(kind, []).append(adoption.scores[key][fmt]["q"])
    return formats, harm


def models() -> list[Model]:
    """Return the three columns: a dense model and a mixture on Hopper, and a rehearsal of Blackwell's formats."""
    job, experts, rehearsal = (
        json.loads((RESULTS / path).read_text(encoding="utf-8")) for path in (MIXTURE, EXPERTS, REHEARSAL)
    )
    ((*_, mixture),) = job["maps"].values()
    chosen: Grid[str] = {}
    for entry, layers in mixture["formats"].items():
        kind, fmt = entry.split()
        chosen.setdefault(kind, []).extend([fmt] * layers)
    (ms,) = experts["mlp"].values()
    return [
        Model(
            "Dense model, Hopper",
            "Llama of 1.1 B, 22 layers, on an H100",
            "harm of each GEMM in fp8_tensor: tiny",
            "the fastest FP8 everywhere",
            *grids(load_run(RECORDED).adoptions[-1], "fp8_tensor"),
        ),
        Model(
            "Mixture of experts, Hopper",
            "4 layers of Qwen3-30B-A3B, on an H200",
            "milliseconds of the MLP of 128 experts",
            "what is fastest for each GEMM",
            chosen,
            bars={"bf16": ms["bf16"], "fp8 in every GEMM": ms["snip_fp8"], "the map below": ms["snip"]},
        ),
        Model(
            "Blackwell's formats, rehearsed",
            "Llama of 5 M, 8 layers, emulated on a CPU",
            "harm of each GEMM in nvfp4: uneven",
            f"nvfp4 where it harms least: {100 * rehearsal['achieved']:.0f} %",
            {kind: row["formats"] for kind, row in rehearsal["gemms"].items()},
            {kind: row["harm"] for kind, row in rehearsal["gemms"].items()},
        ),
    ]


def shade(harm: float) -> str:
    """Return the colour of a harm in nats."""
    return SHADES[sum(harm >= bound for bound in BOUNDS)]


def linear_name(kind: str) -> str:
    """Return ``attention qkv`` for ``self_attention.linear_qkv:fprop``."""
    owner, *_, linear = kind.partition(":")[0].split(".")
    return f"{owner.removeprefix('self_').replace('mlp', 'MLP')} {linear.removeprefix('linear_')}"


def row_top(row: int) -> int:
    """Return how far a row is below its grid's top. Three rows, those of one linear, stand together."""
    return ROW * row + 5 * (row // 3)


def grid(x: float, y: float, colours: Grid[str]) -> list[str]:
    """Return the cells of a grid."""
    parts = []
    for row, line in enumerate(colours.values()):
        width, top = GRID / len(line), y + row_top(row)
        for layer, colour in enumerate(line):
            place = f'x="{x + layer * width:.1f}" y="{top}" width="{width - 0.8:.1f}" height="{ROW - 1}"'
            parts.append(f'<rect {place} fill="{colour}"/>')
    return parts


def bars(x: float, y: float, values: Mapping[str, float]) -> list[str]:
    """Return horizontal bars, each below its name and its value."""
    parts = []
    for number, (name, value) in enumerate(values.items()):
        top, colour = y + 8 + 44 * number, OWN if number == len(values) - 1 else OTHER
        width = GRID * value / max(values.values())
        parts += [
            text(x, top + 10, f"{name}: {value:.1f} ms", size=11),
            f'<rect x="{x}" y="{top + 15}" width="{width:.1f}" height="14" fill="{colour}"/>',
        ]
    return parts


def legend(y: float, colours: Mapping[str, str]) -> list[str]:
    """Return what the colours mean, in a line."""
    parts, x = [], float(LABELS)
    for name, colour in colours.items():
        parts += [f'<rect x="{x:.0f}" y="{y - 9}" width="12" height="11" fill="{colour}"/>']
        parts += [text(x + 17, y, name, size=11)]
        x += 36 + 6.3 * len(name)
    return parts


def picture() -> str:
    """Return the picture: in the upper row what is measured, in the lower one what is chosen."""
    columns, upper, lower = models(), 102, 354
    parts = [text(12, 22, "What SNIP measures, and which format it chooses for each GEMM", weight="bold")]
    for number, model in enumerate(columns):
        x = LABELS + number * (GRID + GAP)
        parts += [
            text(x, 52, model.title, weight="bold", size=12),
            text(x, 67, model.what, size=10.5),
            text(x, upper - 9, model.measured, size=10.5),
            text(x, lower - 9, model.chosen, size=10.5),
            *grid(x, lower, {k: [COLOURS[v] for v in row] for k, row in model.formats.items()}),
        ]
        if model.harm is not None:
            parts += grid(x, upper, {k: [shade(v) for v in row] for k, row in model.harm.items()})
        if model.bars is not None:
            parts += bars(x, upper, model.bars)
    for y, word in ((upper, "Measured"), (lower, "Chosen")):
        parts.append(text(12, y - 9, word, weight="bold"))
        for row, kind in enumerate(columns[0].formats):
            parts.append(text(LABELS - 8, y + row_top(row) + 10, kind.partition(":")[2], anchor="end", size=10))
            if row % 3 == 1:
                parts.append(text(12, y + row_top(row) + 10, linear_name(kind), size=11))
    harms = ("harm in nats: below 10⁻⁷", "10⁻⁷", "10⁻⁶", "10⁻⁵", "from 10⁻⁴ on")
    parts += legend(upper + HEIGHT + 17, dict(zip(harms, SHADES, strict=True)))
    used = ("bf16", "fp8", "fp8_tensor", "mxfp8", "nvfp4")
    parts += legend(lower + HEIGHT + 17, {fmt: COLOURS[fmt] for fmt in used})
    notes = (
        "A column of cells is a layer, from the first to the last.",
        "Harm is the predicted rise of the loss; that of dgrad and wgrad is a score on the same scale.",
    )
    parts += [text(12, lower + HEIGHT + 42 + 15 * i, note, size=10.5) for i, note in enumerate(notes)]
    return document(LABELS + 3 * (GRID + GAP), lower + HEIGHT + 68, parts)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the compact result of a run."""
    parser = argparse.ArgumentParser(description="Keep what the picture of maps needs of a run")
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--format", default="nvfp4", help="the format whose harm is kept")
    parser.add_argument("--what", default="", help="how the run was made")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    adoption = load_run(arguments.run).adoptions[-1]
    formats, harm = grids(adoption, arguments.format)
    gemms = {kind: {"formats": formats[kind], "harm": harm[kind]} for kind in formats}
    facts = {"step": adoption.step, "achieved": adoption.achieved}
    write(arguments.out, header(arguments.commit) | {"what": arguments.what} | facts | {"gemms": gemms})


if __name__ == "__main__":
    main()

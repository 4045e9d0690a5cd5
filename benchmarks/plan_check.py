"""Compares predictions of ``snip plan`` with measured steps and linears: relative errors.

    python benchmarks/plan_check.py [--timings h200] [--layer FILE.json] [--linear FILE.json] [--out RESULT.json]

``--layer`` is a result of ``layer.py`` (blocks through Megatron's forward and backward), whose milliseconds a step,
bytes saved by linears and peak memory are predicted. ``--linear`` is a result of ``linear.py``: one linear with all
quantisation. No GPU is needed. The comparison is meaningful only if the table of times comes from other measurements
than the results; the output names the origin of both. With ``--out RESULT.json`` the tables are also written to
``RESULT.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snip_megatron.planner.layout import Layout
from snip_megatron.planner.memory import saved_input, stage_memory
from snip_megatron.planner.step_time import StepModel
from snip_megatron.precision import LINEAR_KINDS, Format
from snip_megatron.timing.loading import load_cost_model
from snip_megatron.timing.models import ModelShape
from snip_megatron.timing.shapes import LinearShape

HERE = Path(__file__).parent
FORMATS = (Format.BF16, Format.FP8, Format.FP8_TENSOR, Format.FP4)
Row = dict[str, Any]


def layer_rows(result: dict[str, Any], timings: str) -> list[Row]:
    """Return one row for each format: milliseconds per step, and bytes of one microbatch."""
    shape, microbatches = result["shape"], int(result["microbatches"])
    hidden, heads = shape["hidden"], shape["heads"]
    sizes = (shape["blocks"], hidden, shape["ffn"], heads, shape["groups"], hidden // heads)
    model = ModelShape("layer", *sizes, vocabulary=128, context=shape["seq"])
    layout = Layout(model, 1, 1, 1, 1, shape["seq"], 1, microbatches)
    step = StepModel(layout, load_cost_model(timings))
    rows = []
    for fmt in FORMATS:
        measured = result["rows"][result["bf16"] if fmt is Format.BF16 else f"snip {fmt.value}"]
        unconverted = result["rows"]["our spec bf16, not converted"] if fmt is Format.BF16 else measured
        formats = (fmt,) * 3
        stage = step.step(lambda block, kind, formats=formats: formats).stages[0]
        blocks = stage.linears + stage.attention + stage.elementwise
        memory = stage_memory(layout, 0, lambda block, kind, formats=formats: formats)
        saved = shape["blocks"] * sum(saved_input(layout, kind, formats) for kind in LINEAR_KINDS)
        if fmt is Format.BF16:  # the benchmark counts the attention's output, which it shares with linear_proj
            saved += shape["blocks"] * 2.0 * layout.tokens * hidden
        peak = memory.activations + memory.working  # quantised weights of the step before were there at the start
        rows.append(
            {
                "format": fmt.value,
                "parts_ms": {name: 1e3 * getattr(stage, name) for name in ("linears", "attention", "elementwise")},
                **_compare("ms_a_step", 1e3 * blocks, measured["ms_a_step"]),
                **_compare("linears_saved_bytes", saved, unconverted["linears_saved_bytes"]),
                **_compare("peak_bytes", peak, measured["peak_bytes_above_start"]),
            }
        )
    bf16 = rows[0]["ms_a_step"]
    for row in rows:
        row |= _compare(
            "speedup",
            bf16["predicted"] / row["ms_a_step"]["predicted"],
            bf16["measured"] / row["ms_a_step"]["measured"],
        )
    return rows


def linear_rows(result: dict[str, Any], timings: str) -> list[Row]:
    """Return one row for each shape and format: milliseconds per microbatch."""
    model = load_cost_model(timings)
    rows = []
    for row in result["rows"]:
        shape = LinearShape(row["m"], row["n"], row["k"], int(result["microbatches_a_weight_quantisation"]))
        for fmt in FORMATS:
            measured = row["bf16_ms"] if fmt is Format.BF16 else row["ms"][f"snip {fmt.value}"]
            predicted = 1e3 * model.linear_seconds(shape, (fmt,) * 3) / shape.microbatches
            rows.append(
                {
                    "tokens": row["m"],
                    "n": row["n"],
                    "k": row["k"],
                    "format": fmt.value,
                    **_compare("ms", predicted, measured),
                    "extrapolated": model.extrapolated(shape),
                }
            )
    return rows


def _compare(name: str, predicted: float, measured: float) -> dict[str, dict[str, float]]:
    return {name: {"predicted": predicted, "measured": measured, "error": predicted / measured - 1.0}}


def render(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    lines = [
        "# Predictions of `snip plan` against measurements",
        "",
        f"Table: {result['table']['device']}, `{result['table']['command']}`, {result['table']['date']},"
        f" commit {result['table']['commit']}.",
        f"Command: `{result['command']}`. Errors are predicted / measured − 1.",
        "",
        f"Blocks through Megatron (`{result['layer_file']}`):",
        "",
        "| format | ms, predicted | measured | error | speedup, predicted | measured | error | peak bytes, error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["layer"]:
        ms, speedup = row["ms_a_step"], row["speedup"]
        lines.append(
            f"| {row['format']} | {ms['predicted']:.1f} | {ms['measured']:.1f} | {ms['error']:+.1%} |"
            f" {speedup['predicted']:.3f} | {speedup['measured']:.3f} | {speedup['error']:+.1%} |"
            f" {row['peak_bytes']['error']:+.1%} |"
        )
    lines += [
        "",
        f"One linear, forward and backward (`{result['linear_file']}`), {len(result['linear'])} rows:",
        "",
        "| format | mean error | mean of absolute errors | worst |",
        "|---|---|---|---|",
    ]
    for fmt, found in result["linear_summary"].items():
        lines.append(f"| {fmt} | {found['mean']:+.1%} | {found['absolute']:.1%} | {found['worst']:+.1%} |")
    return "\n".join(lines) + "\n"


def _summary(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    found = {}
    for fmt in FORMATS:
        errors = [row["ms"]["error"] for row in rows if row["format"] == fmt.value]
        found[fmt.value] = {
            "mean": math.fsum(errors) / len(errors),
            "absolute": math.fsum(map(abs, errors)) / len(errors),
            "worst": max(errors, key=abs),
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Errors of predicted times and memory")
    parser.add_argument("--timings", default="h200", help="as snip plan's")
    parser.add_argument("--layer", type=Path, default=HERE / "layer_llama-8b_h200_2026-11-21.json")
    parser.add_argument("--linear", type=Path, default=HERE / "linear_llama-8b-70b_h200_2026-11-21.json")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    layer, linear = (json.loads(path.read_text()) for path in (arguments.layer, arguments.linear))
    model: Any = load_cost_model(arguments.timings)
    table = model.table
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "table": {
            "device": table.device,
            **{key: table.about.get(key) for key in ("date", "commit", "command", "notes")},
        },
        "layer_file": arguments.layer.name,
        "linear_file": arguments.linear.name,
        "layer": layer_rows(layer, arguments.timings),
        "linear": linear_rows(linear, arguments.timings),
    }
    result["linear_summary"] = _summary(result["linear"])
    text = render(result)
    sys.stdout.write(text)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

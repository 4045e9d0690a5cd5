"""A table of timings from the parts that ``linear.py`` measured, for a device that nobody has calibrated yet.

    python benchmarks/timings_from_linear.py benchmarks/linear_<hardware>_<date>.json --out FILE.json

The parts were timed alone and on a cooler card than the whole linear: they are scaled so that they add up to it. bf16
was measured as a whole only: its three GEMMs, which have equal FLOPs, get a third each. Both sides of a quantisation
were measured, one side is taken to cost half. ``snip calibrate`` measures all this instead.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from snip_megatron.precision import Format
from snip_megatron.solver.timing_table import TimingTable

NOTE = (
    "from benchmarks/linear.py: parts scaled to the measured whole, bf16 GEMMs a third of the whole each, one side of a"
    " quantisation half of both; of an operand measured with several weights the fastest"
)
FORMATS = (Format.FP8, Format.FP8_TENSOR, Format.FP4)


def table(result: dict[str, Any], about: dict[str, Any]) -> TimingTable:
    """The result of ``linear.py`` as a table."""
    gemms: dict[tuple[int, ...], Any] = {}
    sides: dict[tuple[str, tuple[int, ...]], dict[Format, float]] = {}
    for row in result["rows"]:
        m, n, k = row["m"], row["n"], row["k"]
        gemms[m, n, k] = {Format.BF16: (row["bf16_ms"] / 3e3,) * 3}
        for fmt in FORMATS:
            parts = {name: part["ms"] / 1e3 for name, part in row["parts"][fmt.value].items()}
            names = ("fprop", "dgrad", "wgrad", "quantize x", "quantize g", "quantize w")
            scale = row["ms"][f"snip {fmt.value}"] / 1e3 / sum(parts[name] for name in names)
            gemms[m, n, k][fmt] = tuple(parts[name] * scale for name in names[:3])
            a_step = parts["quantize w"] * result["microbatches_a_weight_quantisation"]
            for key, seconds in (
                (("input", (m, k)), parts["quantize x"]),
                (("gradient", (m, n)), parts["quantize g"]),
                (("weight", (n, k)), a_step),
            ):
                known = sides.setdefault(key, {})
                known[fmt] = min(known.get(fmt, float("inf")), seconds * scale)
    both = [size for operand, size in sides if operand == "input" and ("gradient", size) in sides]
    activations = {
        size: {
            operand: {fmt: (t / 2, t / 2, t) for fmt, t in sides[operand, size].items()}
            for operand in ("input", "gradient")
        }
        for size in both
    }
    weights = {size: times for (operand, size), times in sides.items() if operand == "weight"}
    return TimingTable(
        device=result["device"],
        backend=result["backend"],
        formats=(Format.BF16, *FORMATS),
        gemms=gemms,
        activations=activations,
        weights=weights,
        copy_rate=result["copy_tb_s"] * 1e12,
        about=about,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="A table of timings from a result of linear.py")
    parser.add_argument("result", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    result = json.loads(arguments.result.read_text())
    command = f"python benchmarks/timings_from_linear.py {arguments.result}"
    about = {key: result[key] for key in ("date", "commit", "versions", "rounds")}
    arguments.out.write_text(table(result, about | {"command": command, "notes": [NOTE]}).to_json())


if __name__ == "__main__":
    main()

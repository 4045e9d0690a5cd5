"""Compares predicted steps of ``snip plan`` with the trainings of :mod:`benchmarks.job`, with and without CUDA graphs.

    python -m benchmarks.plan_job --job benchmarks/job_1b_h200_2026-11-22.json [--timings mine.json] [--out F.json]

No GPU is needed. The contenders with one format in every GEMM are compared: their step times, and their speedups over
bf16 without graphs. ``--timings`` is a table of ``snip calibrate``. A table from the machine of the job includes its
host seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.job_contenders import CONTENDERS
from snip_megatron.planner.layout import Layout
from snip_megatron.planner.step_time import StepModel
from snip_megatron.precision import Format
from snip_megatron.timing.cost_model import CostModel
from snip_megatron.timing.loading import load_cost_model
from snip_megatron.timing.models import ModelShape

HERE = Path(__file__).parent


def layout_of(job: dict[str, Any], graphs: str) -> Layout:
    """Return the layout of a job's trainings on one GPU."""
    if job["gpus"] != 1:
        sys.exit(f"plan_job.py: the job ran on {job['gpus']} GPUs, and only one is supported")
    given = job["arguments"]
    sizes = {name: int(value) for name, value in zip(given[::2], given[1::2], strict=True)}
    heads, hidden = sizes["--num-attention-heads"], sizes["--hidden-size"]
    seq = sizes["--seq-length"]
    shape = ModelShape(
        job["model"], sizes["--num-layers"], hidden, sizes["--ffn-hidden-size"], heads, sizes["--num-query-groups"],
        hidden // heads, sizes["--vocab-size"], seq,
    )  # fmt: skip
    micro, batch = sizes["--micro-batch-size"], sizes["--global-batch-size"]
    return Layout(shape, 1, 1, 1, 1, seq, micro, batch, cuda_graph_impl=graphs)


def rows_of(job: dict[str, Any], model: CostModel) -> list[dict[str, Any]]:
    """Return one row for each contender with one format: predicted, measured, and predicted / measured − 1."""
    rows: list[dict[str, Any]] = []
    for name, measured in job["ms"].items():
        contender = CONTENDERS[name]
        fmt = contender.map or Format.BF16
        if contender.transformer_engine or contender.updates or fmt not in model.formats:
            continue
        tried = job["graphs"].get(name, {})
        graphs = min(tried, key=tried.__getitem__) if tried else "none"
        formats = (fmt,) * 3
        step = StepModel(layout_of(job, graphs), model).step(lambda block, kind, formats=formats: formats)
        rows.append({"contender": name, "graphs": graphs, "ms": _compare(1e3 * step.total, measured)})
        rows[-1]["host_ms"] = 1e3 * step.stages[0].host if step.stages[0].host_known else None
    base = next(row["ms"] for row in rows if row["contender"] == "bf16")
    for row in rows:
        row["speedup"] = _compare(base["predicted"] / row["ms"]["predicted"], base["measured"] / row["ms"]["measured"])
    return rows


def _compare(predicted: float, measured: float) -> dict[str, float]:
    return {"predicted": predicted, "measured": measured, "error": predicted / measured - 1.0}


def main() -> int:
    parser = argparse.ArgumentParser(description="Errors of predicted steps of whole trainings")
    parser.add_argument("--job", type=Path, default=HERE / "job_1b_h200_2026-11-22.json")
    parser.add_argument("--timings", default="h200", help="as snip plan's")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    job = json.loads(arguments.job.read_text(encoding="utf-8"))
    rows = rows_of(job, load_cost_model(arguments.timings))
    print("contender                ms predicted  measured   error   speedup predicted  measured   error")
    for row in rows:
        ms, speedup = row["ms"], row["speedup"]
        print(
            f"{row['contender']:24s} {ms['predicted']:12.1f} {ms['measured']:9.1f} {ms['error']:+7.1%}"
            f" {speedup['predicted']:19.3f} {speedup['measured']:9.3f} {speedup['error']:+7.1%}"
        )
    if arguments.out is not None:
        about = {"command": " ".join(["python -m benchmarks.plan_job", *sys.argv[1:]]), "job": arguments.job.name}
        arguments.out.write_text(json.dumps(about | {"timings": arguments.timings, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

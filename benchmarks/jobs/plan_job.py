"""Compares predicted steps of ``snip plan`` with the trainings of :mod:`benchmarks.job`, with and without CUDA graphs.

    python -m benchmarks.jobs.plan_job --job results/jobs/job_1b.json [--timings mine.json] [--out F.json]

No GPU is needed. SNIP's contenders and bf16 are compared: their step times, and their speedups over bf16 with the same
graph setting, or with the other one if the job lacks it. Contenders with updates found their own maps, of which the job
keeps no copy. Under the default budget everything is taken to be in fp8_tensor. Under a share of 75 %, dgrad and wgrad
are taken to be in fp4, and fprop in fp4 in every fourth block and else in fp8. ``--timings`` is a table of ``snip
calibrate``. Context parallelism is not predicted.

    python -m benchmarks.jobs.plan_job --mixtures results/jobs/job_qwen3-moe*.json [--out F.json]

compares the steps of mixtures under the first map of ``--snip`` alone with their predictions at the time, and with
those of the plan. A run whose steps in bf16 wait for their host predicts the latter, from GEMM times that it measured.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import write
from benchmarks.job import read_job
from benchmarks.jobs.contenders import CONTENDERS, MODELS, Contender
from benchmarks.jobs.multi_gpu_runs import LLAMA
from snip_megatron.planner.layout import Layout
from snip_megatron.planner.models import Llama
from snip_megatron.planner.step_time import StepModel
from snip_megatron.precision import ALL_BF16, Format, Formats, Gemm, LinearRow
from snip_megatron.precision.errors import SnipError
from snip_megatron.timing.cost_model import CostModel, load_cost_model
from snip_megatron.tools.plan import training_of

JOBS = Path(__file__).resolve().parents[1] / "results" / "jobs"


def layout_of(job: dict[str, Any]) -> Layout:
    """Return the layout of a job's trainings."""
    sizes = _values(job["arguments"])
    if int(sizes.get("--context-parallel-size", 1)) > 1:
        sys.exit("plan_job.py: the job ran with context parallelism, which snip plan does not predict")
    heads, hidden, seq = (int(sizes[f"--{name}"]) for name in ("num-attention-heads", "hidden-size", "seq-length"))
    llama = Llama(
        job["model"], int(sizes["--num-layers"]), hidden, int(sizes["--ffn-hidden-size"]), heads,
        int(sizes["--num-query-groups"]), hidden // heads, int(sizes["--vocab-size"]), seq,
    )  # fmt: skip
    tp, pp = (int(sizes.get(f"--{name}-model-parallel-size", 1)) for name in ("tensor", "pipeline"))
    return Layout(
        llama.model(pp), tp, pp, 1, job["gpus"] // (tp * pp), seq, int(sizes["--micro-batch-size"]),
        int(sizes["--global-batch-size"]), sequence_parallel="--sequence-parallel" in sizes,
        gradient_accumulation_fusion="--fused-accumulation" in job["command"],  # no such machine has had Apex
    )  # fmt: skip


def first_map(job: dict[str, Any], model: CostModel) -> dict[str, float]:
    """Return milliseconds of a step of a mixture in bf16 and under its first map, and errors of the predictions."""
    (name,) = (name for name in job["maps"] if name.startswith("snip_default"))
    mixture = MODELS[job["model"]]
    words = [*LLAMA, *job["arguments"], *mixture.transformer_engine, "--train-iters", "60"]
    if "--multi-latent-attention" in words:
        words.remove("--group-query-attention")
    layout = training_of(words, job["gpus"]).layout
    assert isinstance(layout, Layout)
    step = StepModel(layout, model)
    formats: dict[str, dict[str, Format]] = {}
    for each in job["maps"][name][0]["formats"]:
        option, _, chosen = each.partition(" ")
        linear, _, gemm = option.rpartition(":")
        formats.setdefault(linear, {})[gemm] = Format(chosen)

    def formats_of(row: LinearRow) -> Formats:
        fprop, dgrad, wgrad = (formats.get(row.id.path, {}).get(gemm, Format.BF16) for gemm in Gemm)
        return fprop, dgrad, wgrad

    usual = job["updates"][name][0]["usual_ms"]
    planned = 1e3 * step.step(formats_of).total
    return {
        "bf16": usual["before"],
        "planned_bf16": 1e3 * (step.step(lambda row: ALL_BF16).total),
        "measured": usual["after"],
        "predicted": job["predicted"][name],
        "planned": planned,
        "error": job["predicted"][name] / usual["after"] - 1.0,
        "planned_error": planned / usual["after"] - 1.0,
    }


def _values(arguments: Sequence[str]) -> dict[str, str]:
    """Return argument → value, "" for a flag."""
    words = [*arguments, "--"]
    return {
        name: "" if value.startswith("--") else value
        for name, value in itertools.pairwise(words)
        if name.startswith("--")
    }


def formats_of(contender: Contender, block: int) -> Formats:
    """Return the formats of fprop, dgrad and wgrad in a block."""
    if contender.updates:
        return (Format.FP8 if block % 4 else Format.FP4, Format.FP4, Format.FP4)
    if contender.updates is not None:  # the default
        return (Format.FP8_TENSOR,) * 3
    return ((contender.map or Format.BF16),) * 3


def rows_of(job: dict[str, Any], model: CostModel) -> list[dict[str, Any]]:
    """Return one row for each contender of SNIP and bf16: predicted, measured, and predicted / measured − 1."""
    rows: list[dict[str, Any]] = []
    chosen = StepModel(layout_of(job), model)
    for name, measured in job["ms"].items():
        contender = CONTENDERS.get(name)  # None for one that is gone
        if contender is None or contender.transformer_engine:
            continue
        if not {*formats_of(contender, 0)} <= {*model.formats}:
            continue
        tried = job["graphs"].get(name, {})
        graphs = min(tried, key=tried.__getitem__) if tried else "none"
        step = chosen.step(lambda row, contender=contender: formats_of(contender, row.id.layer))
        rows.append({"contender": name, "graphs": graphs, "ms": _compare(1e3 * step.total, measured)})
    bases = {row["graphs"]: row["ms"] for row in rows if row["contender"] in ("bf16", "bf16_graphs")}
    for row in rows:
        base = bases.get(row["graphs"], next(iter(bases.values())))
        row["speedup"] = _compare(base["predicted"] / row["ms"]["predicted"], base["measured"] / row["ms"]["measured"])
    return rows


def _compare(predicted: float, measured: float) -> dict[str, float]:
    return {"predicted": predicted, "measured": measured, "error": predicted / measured - 1.0}


def main() -> int:
    parser = argparse.ArgumentParser(description="Errors of predicted steps of whole trainings")
    parser.add_argument("--job", type=Path, default=JOBS / "job_1b-default_h200_2026-11-26.json")
    parser.add_argument("--mixtures", type=Path, nargs="+", metavar="JOB", help="first maps of mixtures instead")
    parser.add_argument("--timings", default="h200", help="as snip plan's")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.mixtures:
        rows = [_mixture(path) for path in arguments.mixtures]
        _write(arguments, {}, rows)
        return 0
    job = read_job(arguments.job, "plan_job.py: --job")
    if not {"bf16", "bf16_graphs"} & job["ms"].keys():
        sys.exit(f"plan_job.py: --job {arguments.job}: has no step of bf16 to compare speedups with")
    try:
        rows = rows_of(job, load_cost_model(arguments.timings))
    except SnipError as error:
        sys.exit(f"plan_job.py: {error}")
    print("contender                ms predicted  measured   error   speedup predicted  measured   error")
    for row in rows:
        ms, speedup = row["ms"], row["speedup"]
        print(
            f"{row['contender']:24s} {ms['predicted']:12.1f} {ms['measured']:9.1f} {ms['error']:+7.1%}"
            f" {speedup['predicted']:19.3f} {speedup['measured']:9.3f} {speedup['error']:+7.1%}"
        )
    _write(arguments, {"job": arguments.job.name, "timings": arguments.timings}, rows)
    return 0


def _mixture(path: Path) -> dict[str, Any]:
    job = read_job(path, "plan_job.py: --mixtures")
    row = first_map(job, load_cost_model(job["device"]))
    print(path.name, *(f"{name} {value:.3g}" for name, value in row.items()))
    return {"job": path.name} | row


def _write(arguments: argparse.Namespace, about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    if arguments.out is not None:
        command = " ".join(["python -m benchmarks.jobs.plan_job", *sys.argv[1:]])
        write(arguments.out, {"command": command} | about | {"rows": rows})


if __name__ == "__main__":
    sys.exit(main())

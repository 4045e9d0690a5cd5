"""A plan as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from snip_megatron.config.defaults import LOSS

Body = dict[str, Any]
_GIB = 2.0**30
_TIGHT = 0.9


def render(plan: Body) -> str:
    """Return the plan as tables for a terminal. The JSON has more details."""
    phases = [] if plan["phases"] is None else [_phases(plan["phases"])]
    sections = (_head(plan), _linears(plan), _stages(plan), _steps(plan), _budget(plan), *phases, _overhead(plan))
    assumptions = "\n".join(["assumptions", *(f"  - {line}" for line in plan["assumptions"])])
    return "\n\n".join([*sections, assumptions]) + "\n"


def _head(plan: Body) -> str:
    model, layout = plan["model"], plan["layout"]
    virtual = f" × VPP {layout['vpp']}" if layout["vpp"] > 1 else ""
    extras = [name for name in ("sequence_parallel", "distributed_optimizer") if layout[name]]
    extras += [f"{name.upper()} {layout[name]}" for name in ("cp", "ep") if layout[name] > 1]
    extras += [f"recompute {layout['recompute']}"] if layout["recompute"] != "none" else []
    extras += [f"communication {layout['communication']}"] if layout["communication"] != "bf16" else []
    extras += [f"gradients {layout['gradient_reduction']}"] if layout["gradient_reduction"] != "fp32" else []
    extras += [] if layout["gradient_accumulation_fusion"] else ["no gradient accumulation fusion"]
    extras += [f"CUDA graphs {layout['cuda_graph_impl']}"] if layout["cuda_graph_impl"] != "none" else []
    noted = f"; {', '.join(extras).replace('_', ' ')}" if extras else ""
    return (
        f"{model['name']}: {model['parameters'] / 1e9:.2f} B parameters, {model['blocks']} blocks\n"
        f"TP {layout['tp']} × PP {layout['pp']}{virtual} × DP {layout['dp']} = {layout['gpus']} GPUs; sequences of"
        f" {layout['seq_length']}, {layout['micro_batch_size']} a microbatch, {layout['global_batch_size']} a step"
        f" = {layout['microbatches']} microbatches{noted}\n"
        f"times: {plan['timings']}"
    )


def _linears(plan: Body) -> str:
    formats = list(plan["linears"][0]["speedup"])
    rows = [
        [
            row["kind"],
            f"{row['gemms']} of {row['tokens']}×{row['n']}×{row['k']}".removeprefix("1 of "),
            f"{1e3 * row['seconds']['bf16']:.3f}",
            *(f"{row['speedup'][fmt]:.2f}" for fmt in formats),
            "extrapolated" if row["extrapolated"] else "",
        ]
        for row in plan["linears"]
    ]
    head = ["linear, a GPU", "tokens×n×k", "bf16 ms", *(f"{fmt} ×" for fmt in formats), ""]
    return _table(head, rows)


def _stages(plan: Body) -> str:
    variants = list(plan["steps"])
    rows = []
    for stage in plan["stages"]:
        chunks = " ".join(f"{first}–{last}" for first, last in stage["chunks"]) or "–"
        memory = stage["bytes"]
        fixed = sum(memory["bf16"][part] for part in ("parameters", "gradients", "optimizer"))
        rows.append(
            [
                str(stage["stage"]),
                chunks if len(chunks) < 40 else f"{stage['blocks']} blocks",
                f"{stage['parameters'] / 1e9:.3f}",
                f"{stage['flops'] / 1e15:.2f}",
                f"{fixed / _GIB:.1f}",
                *(f"{memory[name]['activations'] / _GIB:.1f}" for name in variants),
                *(f"{memory[name]['training'] / _GIB:.1f}" for name in variants),
                f"{memory['map']['probing_least'] / _GIB:.1f}–{memory['map']['probing'] / _GIB:.1f}",
                *(f"{stage['seconds'][name]['total']:.3f}" for name in variants),
                f"{stage['busy']['map']:.0%}",
            ]
        )
    head = ["stage", "blocks", "B params", "PFLOP", "fixed"]
    head += [f"acts {name}" for name in variants] + [f"peak {name}" for name in variants] + ["probe"]
    head += [f"s {name}" for name in variants] + ["busy (map)"]
    return (
        "a GPU of each stage: PFLOP of linears a step; memory in GiB; seconds of work a step\n"
        "  fixed: weights, gradients and optimizer; acts: saved for the backward; peak: of training;\n"
        "  probe: peak of an update on one sequence and on whole microbatches, as memory allows\n"
        "  busy: work over that of the slowest stage\n" + _table(head, rows) + _fit(plan["memory"])
    )


def _fit(memory: Body) -> str:
    if memory["fits"] is None:
        return ""
    peak, gpu = memory["peak"] / _GIB, memory["gpu"] / _GIB
    if not memory["fits"]:
        return (
            f"\n  does not fit: the map needs {peak:.1f} GiB, and a GPU has {gpu:.1f}: use more GPUs (--tp, --pp,"
            " or --dp with the distributed optimizer), --recompute or smaller microbatches"
        )
    tight = peak > _TIGHT * gpu
    rest = ", little for what is not counted: CUDA graphs, fragmentation, NCCL" if tight else ""
    return f"\n  fits: the map needs {peak:.1f} GiB of the {gpu:.1f} that a GPU has{rest}"


def _steps(plan: Body) -> str:
    rows = [
        [
            name,
            f"{step['seconds']:.3f}",
            f"{step['speedup']:.3f}",
            f"{step['linears_speedup']:.3f}",
            f"{step['tokens_per_second_per_gpu']:.0f}",
            f"{step['linear_flops_per_second_per_gpu'] / 1e12:.0f}",
            f"{step['balance']:.1%}",
            f"{step['bubble']:.1%}",
        ]
        for name, step in plan["steps"].items()
    ]
    head = ["step", "seconds", "speedup", "of linears", "tokens/s/GPU", "TFLOP/s/GPU", "balance", "bubble"]
    return _table(head, rows)


def _budget(plan: Body) -> str:
    budget = plan["budget"]
    gemms = ", ".join(f"{count} {fmt}" for fmt, count in sorted(budget["gemms"].items()))
    return (
        f"budget {budget['asked']} over {','.join(budget['formats'])} by {budget['granularity']}, losses"
        f" {budget['losses']}: {budget['status']} in {budget['solve_seconds']:.2f} s, Σ loss {budget['loss']:.4g}\n"
        f"  planned {budget['planned']:.4g} of {budget['asked'].partition('=')[2]} asked\n"
        f"  GEMMs: {gemms}; fp4 share {budget['fp4_share']:.4f}; in training: {budget['snip_arguments']}"
        + "".join(f"\n  {line}" for line in [beaten(plan)] if line)
    )


def beaten(plan: Body) -> str:
    """Return a line if a uniform format is as fast as the map and loses no more, with the better command; else ""."""
    budget, steps = plan["budget"], plan["steps"]
    if (uniform := budget["beaten"]) is None:
        return ""
    speedup = steps["bf16"]["seconds"] / uniform["seconds"]
    better = f"--snip-pin '*={uniform['format']}'"
    if budget["asked"].startswith("fp4="):
        better = f"--snip-budget {LOSS}, the default"
    return (
        f"{uniform['format']} everywhere beats this map: {speedup:.3f} × bf16 (the map {steps['map']['speedup']:.3f}),"
        f" Σ loss {uniform['loss']:.3g} (the map {budget['loss']:.3g}); for speed use {better}"
    )


def _phases(run: Body) -> str:
    rows = [
        [
            str(i),
            f"{phase['from_step']}–{phase['from_step'] + phase['steps'] - 1}",
            str(phase["steps"]),
            f"{phase['fp4_share']:.4f}",
            f"{phase['seconds']:.3f}",
            f"{run['bf16_seconds']:.3f}",
            f"{phase['speedup']:.3f}",
            f"{phase['saved_seconds']:.0f}",
            f"{phase['loss']:.4g}",
        ]
        for i, phase in enumerate(run["phases"])
    ]
    head = ["phase", "steps", "count", "fp4 share", "s a step", "s bf16", "speedup", "saves s", "Σ loss"]
    return (
        f"phases of --schedule {run['schedule']} over {run['train_iters']} steps, deployed in"
        f" {'the formats of the last phase' if run['deployed'] == 'map' else 'bf16'}: {run['status']} in"
        f" {run['solve_seconds']:.2f} s,\n  Σ loss {run['loss']:.4g} (one map for the run: {run['static_loss']:.4g})\n"
        f"{_table(head, rows)}\n"
        f"  average over the run: fp4 share {run['average_fp4_share']:.4f}, {run['average_seconds']:.3f} s a step,"
        f" speedup {run['average_speedup']:.3f} (of the linears {run['average_linears_speedup']:.3f}); saves"
        f" {run['saved_seconds']:.0f} s\n"
        f"  budget {run['asked']}: {run['achieved']:.4f} by the sums over GEMMs that the solver counts\n"
        f"  in training: --snip-schedule {run['schedule']}"
        f"{' --snip-eval bf16' if run['deployed'] == 'bf16' else ''} --train-iters {run['train_iters']}"
    )


def _overhead(plan: Body) -> str:
    costs = plan["overhead"]
    if not costs["passes"]:
        return f"policy {costs['policy']}: its map is fixed, nothing is measured"
    source = f"estimator {costs['estimator']}" if costs["policy"] == "snip" else f"policy {costs['policy']}"
    kinds = ", ".join(f"{kind.replace('_', ' ')} {count}" for kind, count in costs["by_kind"].items())
    return (
        f"an update of SNIP ({source}): {costs['microbatches']} microbatch passes a GPU ({kinds}) in {costs['passes']}"
        f" calls of the schedule,\n"
        f"  {costs['steps']:.2f} bf16 steps ({costs['seconds']:.2f} s, {costs['reducing_seconds']:.2f} s of it for"
        f" gradients over data parallel ranks); every {costs['interval']} steps {costs['share']:.2%} of training\n"
        f"{_recapture(costs)}"
    ).rstrip()


def _recapture(costs: Body) -> str:
    """Return a line about the CUDA graphs that an adoption captures anew; empty without graphs."""
    least, most = costs["least_recapture_seconds"], costs["recapture_seconds"]
    if not most:
        return ""
    if least == most:
        return f"  CUDA graphs: every map captures all layers, {most:.2f} s\n"
    return (
        f"  CUDA graphs: the first map captures all layers, {most:.2f} s; a later one those that it changes,"
        f" {least:.2f} s (one) to {most:.2f} s (all)\n"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    left = {0, 1}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )

"""A plan as text."""

from collections.abc import Iterable, Sequence
from typing import Any

Body = dict[str, Any]
_GIB = 2.0**30
_TIGHT = 0.9


def render(plan: Body) -> str:
    """Return the plan as tables for a terminal. The JSON has more details."""
    sections = (_head(plan), _linears(plan), _stages(plan), _steps(plan), _budget(plan), _overhead(plan))
    assumptions = "\n".join(["assumptions", *(f"  - {line}" for line in plan["assumptions"])])
    return "\n\n".join([*sections, assumptions]) + "\n"


def _head(plan: Body) -> str:
    model, layout = plan["model"], plan["layout"]
    sizes = [f"{name.upper()} {layout[name]}" for name in ("tp", "pp", "vpp", "cp", "dp") if layout[name] > 1]
    sizes += [f"experts over {layout['ep']}"] if layout["ep"] > 1 else []
    gpus = f"{' × '.join(sizes)} = {layout['gpus']} GPUs" if sizes else "1 GPU"
    extras = [name for name in ("sequence_parallel", "distributed_optimizer") if layout[name]]
    extras += [f"recompute {layout['recompute']}"] if layout["recompute"] != "none" else []
    extras += [] if layout["gradient_accumulation_fusion"] else ["no gradient accumulation fusion"]
    return (
        f"{model['name']}: {model['parameters'] / 1e9:.2f} B parameters, {model['blocks']} blocks\n"
        f"{gpus}; sequences of {layout['seq_length']},"
        f" {layout['micro_batch_size']} a microbatch, {layout['global_batch_size']} a step ="
        f" {layout['microbatches']} microbatches; {', '.join(extras).replace('_', ' ')}\n"
        f"times: {plan['timings']}"
    )


def _linears(plan: Body) -> str:
    formats = list(plan["linears"][0]["speedup"])
    rows = []
    for row in plan["linears"]:
        size = f"{row['gemms']} of {row['tokens']}×{row['n']}×{row['k']}".removeprefix("1 of ")
        times = f"{1e3 * row['seconds']['bf16']:.3f}", *(f"{row['speedup'][fmt]:.2f}" for fmt in formats)
        rows.append([row["kind"], size, *times, "extrapolated" if row["extrapolated"] else ""])
    return _table(["linear, a GPU", "tokens×n×k", "bf16 ms", *(f"{fmt} ×" for fmt in formats), ""], rows)


def _stages(plan: Body) -> str:
    variants = list(plan["steps"])
    rows = []
    for stage in plan["stages"]:
        chunks = " ".join(f"{first}–{last}" for first, last in stage["chunks"]) or "–"
        memory, under_map = stage["bytes"], stage["bytes"]["map"]
        fixed = under_map["parameters"] + under_map["gradients"] + under_map["optimizer"]
        gib = [fixed, under_map["activations"], *(memory[name]["training"] for name in variants)]
        rows.append(
            [
                str(stage["stage"]), chunks if len(chunks) < 40 else f"{stage['blocks']} blocks",
                f"{stage['parameters'] / 1e9:.3f}", f"{stage['flops'] / 1e15:.2f}",
                *(f"{part / _GIB:.1f}" for part in gib),
                f"{under_map['probing_least'] / _GIB:.1f}–{under_map['probing'] / _GIB:.1f}",
                *(f"{stage['seconds'][name]['total']:.3f}" for name in variants), f"{stage['busy']['map']:.0%}",
            ]
        )  # fmt: skip
    head = ["stage", "blocks", "B params", "PFLOP", "fixed", "acts map", *(f"peak {name}" for name in variants)]
    head += ["probe", *(f"s {name}" for name in variants), "busy (map)"]
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
    note = ", little for what is not counted: CUDA graphs, fragmentation, NCCL" if peak > _TIGHT * gpu else ""
    return f"\n  fits: the map needs {peak:.1f} GiB of the {gpu:.1f} that a GPU has{note}"


def _steps(plan: Body) -> str:
    columns = {
        "seconds": ("seconds", ".3f"),
        "speedup": ("speedup", ".3f"),
        "of linears": ("linears_speedup", ".3f"),
        "tokens/s/GPU": ("tokens_per_second_per_gpu", ".0f"),
        "FLOP/s/GPU": ("linear_flops_per_second_per_gpu", ".2e"),
        "balance": ("balance", ".1%"),
        "bubble": ("bubble", ".1%"),
    }
    rows = [
        [name, *(f"{step[field]:{form}}" for field, form in columns.values())] for name, step in plan["steps"].items()
    ]
    return _table(["step", *columns], rows)


def _budget(plan: Body) -> str:
    budget = plan["budget"]
    gemms = ", ".join(f"{count} {fmt}" for fmt, count in sorted(budget["gemms"].items()))
    head = f"budget {budget['asked']} over {','.join(budget['formats'])} by {budget['granularity']}"
    if budget["losses"] is None:
        head += ": the fastest uniform map, because losses are not known before a run\n"
    elif budget["losses"] == "synthetic":
        head += (
            f": planned {budget['planned']:.4g} of {budget['asked'].partition('=')[2]} asked; no map is shown, because"
            " losses are not known before a run\n"
        )
    else:
        head += (
            f", losses {budget['losses']}: {budget['status']} in {budget['solve_seconds']:.2f} s, Σ loss"
            f" {budget['loss']:.4g}\n  planned {budget['planned']:.4g} of {budget['asked'].partition('=')[2]} asked\n"
        )
    head += "" if budget["losses"] == "synthetic" else f"  GEMMs: {gemms}; fp4 share {budget['fp4_share']:.4f}\n"
    return f"{head}  in training: {budget['snip_arguments']}" + (
        f"\n  {budget['dominated']}" if budget["dominated"] else ""
    )


def _overhead(plan: Body) -> str:
    costs = plan["overhead"]
    if costs["fixed"]:
        return f"{costs['fixed']}, nothing is measured; the map above is that of the budget"
    source = f"estimator {costs['estimator']}" if costs["policy"] == "snip" else f"policy {costs['policy']}"
    kinds = ", ".join(f"{kind.replace('_', ' ')} {count}" for kind, count in costs["by_kind"].items())
    return (
        f"an update of SNIP ({source}): {costs['microbatches']} microbatch passes a GPU ({kinds}) in {costs['passes']}"
        f" calls of the schedule,\n"
        f"  {costs['steps']:.2f} bf16 steps ({costs['seconds']:.2f} s, {costs['reducing_seconds']:.2f} s of it for"
        f" gradients over data parallel ranks); every {costs['update_interval']} steps {costs['share']:.2%} of training"
        f"\n{_update_scale(costs, plan['budget'])}"
    )


def _update_scale(costs: Body, budget: Body) -> str:
    """Describe what an update exchanges beside its passes, as the number of data parallel ranks grows."""
    groups = list(dict.fromkeys(group for row in costs["ranks"] for group in row["groups"]))
    rows = []
    for row in costs["ranks"]:
        calls = [row["groups"].get(group, (0, 0)) for group in groups]
        cells = [f"{count}: {size / 1e6:.3f}" if count else "" for count, size in calls]
        rows.append([str(row["ranks"]), str(row["dp"]), *cells])
    return (
        "  collectives of an update beside its passes, and MB of a GPU in them (of the stage that exchanges most):\n"
        + _table(["GPUs", "DP", *groups], rows)
        + f"\n  rank 0: table {costs['table_bytes'] / 1e6:.3f} MB, map {costs['decision_bytes'] / 1e6:.3f} MB, solver"
        f" {budget['solve_seconds']:.2f} s (measured here); it writes {costs['files']} files, the other ranks open none"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )

"""The figures of the page as plotly's data and layout, and the maps as data for the page's script."""

import html
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from snip_megatron.precision import Format, Gemm, LinearId, PrecisionMap, format_shares, option_id, split_option_id
from snip_megatron.runtime.run_data import Adoption, RunData, number, version_of

MAX_POINTS = 2000
"""Number of buckets of a thinned line. The lowest and highest value of each are drawn, so that spikes stay visible."""
_COLOURS = {
    Format.BF16: "#8f99a8",
    Format.FP8: "#3f83c8",
    Format.FP8_TENSOR: "#2a5d95",
    Format.MXFP8: "#7fb2e5",
    Format.FP4: "#e8833a",
    Format.NVFP4: "#c2571a",
    Format.MXFP4: "#f4b477",
    Format.NVFP4_46: "#8f3b0c",
    Format.NVFP4_HADAMARD: "#b5443c",
    Format.MXFP4_HADAMARD: "#c9a227",
}
FORMAT_COLOURS = {fmt: _COLOURS.get(fmt, _COLOURS[fmt.base]) for fmt in Format}
"""8-bit formats are blue and 4-bit formats orange or brown. Colour-blind readers can distinguish them in light and dark
mode. A variant that is not in the table has the colour of its base.
"""
STAGE_COLOURS = ("#3f83c8", "#e8833a", "#3a9e7c", "#b568b8", "#c9a227", "#d1495b", "#5fa8a0", "#8f99a8")
LINE, MARK, FAULT = "#3f83c8", "#e8833a", "#d1495b"


def _figure(
    y_title: str, data: list[dict[str, Any]], *, share: bool = False, shapes: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return data and layout of a figure over training steps. With ``share`` the y axis shows shares as per cent."""
    y: dict[str, Any] = {"title": {"text": y_title}} | ({"tickformat": ".0%", "range": [0, 1.02]} if share else {})
    layout = {
        "hovermode": "x unified",
        "margin": {"l": 56, "r": 12, "t": 32, "b": 44},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        "showlegend": True,
        "xaxis": {"title": {"text": "training step"}},
        "yaxis": y,
        "shapes": list(shapes),
    }
    return {"data": data, "layout": layout}


def _line(
    name: str, x: Sequence[Any], y: Sequence[Any], colour: str, hover: str = "%{y:.4f}", **line: Any
) -> dict[str, Any]:
    """Return a line. ``hover`` is plotly's template of its hover text, ``line`` its width, dash and shape."""
    trace = {"type": "scatter", "mode": "lines", "name": html.escape(name, quote=False), "hovertemplate": hover}
    return trace | {"x": list(x), "y": list(y), "line": {"color": colour, "width": 1.6} | line}


def thin(steps: Sequence[int], values: Sequence[float | None]) -> tuple[list[int], list[float | None]]:
    """Reduce a line to at most 2·MAX_POINTS points: the lowest and the highest value of each bucket of steps."""
    if len(steps) <= 2 * MAX_POINTS:
        return list(steps), list(values)
    selected: list[int] = []
    for bucket in range(MAX_POINTS):
        start, stop = (len(steps) * b // MAX_POINTS for b in (bucket, bucket + 1))
        finite = [(value, i) for i in range(start, stop) if (value := values[i]) is not None]
        selected += sorted({min(finite)[1], max(finite)[1]}) if finite else [start]
    return [steps[i] for i in selected], [values[i] for i in selected]


def loss_figure(run: RunData) -> dict[str, Any] | None:
    """Draw the loss over steps with adoptions, guard events and validations. None if no loss is recorded."""
    steps, losses = run.series("loss")
    points = [(step, loss) for step, loss in zip(steps, losses, strict=True) if loss is not None]
    if not points:
        return None
    data = [_line("training loss", *thin(steps, losses), LINE)]
    for (formats, values), colour in zip(run.validations().items(), STAGE_COLOURS[2:], strict=False):
        kind, _, data_set = formats.partition(", ")
        name = ("validation in bf16" if kind == "bf16" else "validation") + (f", {data_set}" if data_set else "")
        data.append(_line(name, *thin(list(values), list(values.values())), colour))
        if len(values) <= 40:
            marker = {"symbol": "circle-open", "size": 8, "color": colour, "line": {"width": 2}}
            data[-1] |= {"mode": "markers", "marker": marker}
    guards = [(e["step"], html.escape(f"guard: {e.get('reason', '')}")) for e in run.events if e["event"] == "guard"]
    marks: list[tuple[str, list[tuple[int, str]], str, str]] = [
        ("map adopted", [(a.step, _adoption_text(a)) for a in run.maps], MARK, "diamond"),
        ("guard", guards, FAULT, "x"),
    ]
    for name, texts, colour, symbol in marks:
        if texts:
            x = [step for step, _ in texts]
            y = [next((loss for s, loss in points if s >= step), points[-1][1]) for step in x]
            marker = {"color": colour, "size": 9, "symbol": symbol}
            trace = {"type": "scatter", "mode": "markers", "name": name, "hovertemplate": "%{text}", "marker": marker}
            data.append(trace | {"x": x, "y": y, "text": [text for _, text in texts]})
    dotted = {"type": "line", "line": {"color": MARK, "width": 1, "dash": "dot"}, "opacity": 0.6}
    dotted |= {"xref": "x", "yref": "y domain", "y0": 0, "y1": 1}
    return _figure("loss", data, shapes=[dotted | {"x0": a.step, "x1": a.step} for a in run.maps])


def format_figure(run: RunData) -> dict[str, Any] | None:
    """Draw the share of each format over steps, four bits lowest: of FLOPs where they are recorded, else of GEMMs."""
    by_name = {fmt.value: fmt for fmt in Format}
    points: list[tuple[int, dict[Format, float]]] = []
    for adoption in run.adoptions:
        shares = adoption.fields.get("formats")
        if isinstance(shares, Mapping):
            points.append((adoption.step, {by_name[f]: number(x) or 0.0 for f, x in shares.items() if f in by_name}))
        elif (precision_map := adoption.precision_map) is not None:
            points.append(
                (adoption.step, format_shares(precision_map, dict.fromkeys(map(str, precision_map.linears()), 1.0)))
            )
    if not points:
        return None
    data = []
    if steps := run.series("loss")[0]:
        first, last = min(steps[0], points[0][0]), max(steps[-1], points[-1][0])
        points = [(first, {Format.BF16: 1.0}), *points, (last, points[-1][1])]
    x = [step for step, _ in points]
    for fmt in sorted(Format, key=lambda fmt: fmt.bits):
        if any(y := [shares.get(fmt, 0.0) for _, shares in points]):
            line = _line(fmt.value, x, y, FORMAT_COLOURS[fmt], "%{y:.2%}", width=0.5, shape="hv")
            data.append(line | {"stackgroup": "formats"})
    if run.budget is not None and run.budget.kind == "fp4":
        budget = [run.budget.value] * 2
        data.append(_line("four bits asked", [x[0], x[-1]], budget, FAULT, width=1.2, dash="dash"))
    return _figure("share of FLOPs" if run.adoptions[-1].fields.get("formats") else "share of GEMMs", data, share=True)


def _adoption_text(adoption: Adoption) -> str:
    version = "" if adoption.version is None else f" v{adoption.version}"
    texts = [f"map{version}: {adoption.status}", "" if adoption.budget is None else f"budget {adoption.budget}"]
    figures = (("fp4 share", adoption.achieved, ".2%"), ("predicted speedup", adoption.speedup, ".3f"),
               ("predicted rise, nats", adoption.loss, ".3g"))  # fmt: skip
    texts += [f"{name} {value:{form}}" for name, value, form in figures if value is not None]
    return "<br>".join(html.escape(text) for text in texts if text)


# -- maps: columns are layers; rows are kinds of linears × GEMMs --------------------------------------------------
_COMMON_MODULES = ("mtp_model_layer", "transformer_layer", "self_attention", "self_attn", "mlp", "mixer")
SCORE_FIELDS = ("delta_loss", "delta_weight", "q")


def map_payload(adoptions: Sequence[Adoption]) -> dict[str, Any] | None:
    """Return the data that the page's script draws, or None if no adopted map is known.

    ``rows`` [R] holds objects {stack, path, gemm, label}, ``layers`` [C] global layer indices, and ``scores`` a list of
    tables [R][C] of {format: [ΔL, ΔW, Q]}. Each of ``maps`` has

    - ``codes`` [R][C]: an index into ``formats``, or null if the model has no such linear,
    - ``changed``: the number of changed GEMMs, or null for the first map,
    - ``scores``: an index into the lists ``scores`` and ``harms``, or null if the scores are not known.

    ``harms`` are tables [R][C] of the score of each GEMM in its costliest format.
    """
    mapped = [a for a in adoptions if a.precision_map is not None and a.precision_map.choices]
    keys = dict.fromkeys(key for a in mapped if a.precision_map for key in a.precision_map.choices)
    linears = dict.fromkeys(split_option_id(key)[0] for key in keys)  # in the model's order
    if not linears:
        return None
    present = {str(linear) for linear in linears}
    layers = sorted({linear.layer for linear in linears})
    kinds = dict.fromkeys((linear.stack, linear.path) for linear in linears)
    rows = [(kind, gemm) for kind in kinds for gemm in Gemm]
    cells = [[(str(LinearId(stack, layer, path)), gemm) for layer in layers] for (stack, path), gemm in rows]
    tables = {id(a.scores): a.scores for a in mapped if a.scores}  # a map that the guard restored shares its scores
    maps: list[dict[str, Any]] = []
    previous: list[list[int | None]] | None = None
    for adoption in mapped:
        precision_map = adoption.precision_map or PrecisionMap(choices={})
        codes = [[precision_map.format_of(*cell).code if cell[0] in present else None for cell in row] for row in cells]
        pairs = [] if previous is None else zip(itertools.chain(*previous), itertools.chain(*codes), strict=True)
        entry = {name: getattr(adoption, name) for name in ("step", "version", "status", "achieved", "speedup")}
        entry["changed"] = None if previous is None else sum(a != b for a, b in pairs)
        entry["scores"] = list(tables).index(id(adoption.scores)) if adoption.scores else None
        maps.append(entry | {"codes": codes})
        previous = codes
    scores = [[[_cell(table, *cell) for cell in row] for row in cells] for table in tables.values()]
    return {
        "formats": [{"name": fmt.value, "colour": FORMAT_COLOURS[fmt]} for fmt in Format],
        "rows": [
            {"stack": k[0], "path": k[1], "gemm": g.value, "label": f"{_short_kind(*k)} · {g.value}"} for k, g in rows
        ],
        "layers": layers,
        "maps": maps,
        "scores": scores,
        "harms": [[[_harm(cell) for cell in row] for row in table] for table in scores],
    }


def _short_kind(stack: str, path: str) -> str:
    """Return a short name for the linears of one path, without the modules that all layers have."""
    *owners, last = path.split(".")
    modules = [name for name in owners if name not in _COMMON_MODULES]
    return " ".join([*([] if stack == "decoder" else [stack]), *modules, last.removeprefix("linear_")])


def _cell(scores: Mapping[str, Any], linear: str, gemm: Gemm) -> dict[str, list[float | None]] | None:
    options = scores.get(option_id(linear, gemm), scores.get(linear))  # at granularity layer, those of the linear
    if not isinstance(options, Mapping):
        return None
    return {
        fmt.value: [None if (x := number(option.get(name))) is None else float(f"{x:.3e}") for name in SCORE_FIELDS]
        for fmt in Format
        if isinstance(option := options.get(fmt.value), Mapping)
    }


def _harm(cell: dict[str, list[float | None]] | None) -> float | None:
    """Return the score Q of the costliest format of a cell."""
    return max((q for _, _, q in (cell or {}).values() if q is not None), default=None)


# -- phases -----------------------------------------------------------------------------------------------------------
def differences(before: PrecisionMap | None, after: PrecisionMap) -> dict[str, str]:
    """Return how the formats of two maps differ, by kind of GEMM, such as ``{"fprop": "12 fp4 → fp8"}``.

    Kinds of GEMM without a difference are left out. If ``before`` is None, all GEMMs ran in bf16.
    """
    old = before if before is not None else PrecisionMap(choices={})
    names = {str(linear) for precision_map in (old, after) for linear in precision_map.linears()}
    changes: dict[str, str] = {}
    for gemm in Gemm:
        counts = Counter((old.format_of(name, gemm).value, after.format_of(name, gemm).value) for name in names)
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        if texts := [f"{count} {a} → {b}" for (a, b), count in ranked if a != b]:
            changes[gemm.value] = ", ".join(texts)
    return changes


def phase_view(run: RunData) -> dict[str, Any] | None:
    """Return the phases of a run's latest plan, as its event lists them. None for a run without plans.

    Each of ``rows`` has the step ``begin``, ``steps``, the state ``when`` (``over``, ``in force``, ``to come`` or
    ``dropped``, if the guard has taken the plan's map back), the map, its fp4 ``share`` and its :func:`differences`
    from the phase before. ``expected`` is the average over the run that the plan reaches, as text.
    """
    event = next((event for event in reversed(run.events) if event["event"] == "plan"), None)
    plan = next((plan for plan in run.plans.values() if event and plan.version == version_of(event)), None)
    listed = event.get("phases") if event else None
    if event is None or plan is None or not isinstance(listed, list):
        return None
    guards = (e for e in run.events[run.events.index(event) :] if e["event"] == "guard")
    dropped = any(guard.get("action") == "taken_back" for guard in guards)
    timed = run.budget is not None and run.budget.kind != "fp4"
    step = int(run.metrics[-1]["step"]) + 1 if run.metrics else 0
    before = next((a.precision_map for a in reversed(run.adoptions) if a.step < event["step"]), None)
    rows: list[dict[str, Any]] = []
    # The event of a plan that was moved may lack the first phases, so that the lists are matched from their ends.
    for body, phase in [*zip(reversed(listed), reversed(plan.phases), strict=False)][::-1]:
        begin, steps = number(body.get("from_step")), number(body.get("steps"))
        if begin is None or steps is None:
            continue
        when = "over" if begin + steps <= step else "dropped" if dropped else "in force" if begin < step else "to come"
        row = {"begin": int(begin), "steps": int(steps), "when": when, "map": phase.precision_map}
        changes = differences(before, phase.precision_map)
        rows.append(row | {"share": number(body.get("fp4_fraction")), "changes": changes})
        before = phase.precision_map
    expected = "" if plan.achieved is None or dropped else f"{plan.achieved:.3f} ×" if timed else f"{plan.achieved:.2%}"
    return {"rows": rows, "timed": timed, "version": plan.version, "budget": str(run.budget), "expected": expected}

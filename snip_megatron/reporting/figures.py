"""The report's figures as plotly data and layout. The page's theme sets the colours of text and grid."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from snip_megatron.errors import needs_extra
from snip_megatron.precision import Format
from snip_megatron.records.run_data import RunData, Update, number
from snip_megatron.reporting.front import Front, Point

with needs_extra("report", "a report"):
    import plotly.graph_objects as go

MAX_POINTS = 2000
"""Number of buckets of a thinned line. Each bucket keeps its lowest and highest value, so that spikes stay visible."""

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
    Format.NVFP4_HADAMARD_FIXED: "#d6756e",
    Format.MXFP4_HADAMARD: "#c9a227",
    Format.MXFP4_HADAMARD_FIXED: "#e3c766",
}
FORMAT_COLOURS = {fmt: _COLOURS.get(fmt, _COLOURS[fmt.base]) for fmt in Format}
"""8-bit formats are blue and 4-bit formats orange or brown. Colour-blind readers can distinguish them in light and dark
mode. A variant without a colour of its own has that of its base.
"""
STAGE_COLOURS = ("#3f83c8", "#e8833a", "#3a9e7c", "#b568b8", "#c9a227", "#d1495b", "#5fa8a0", "#8f99a8")
LINE, MARK, FAULT = "#3f83c8", "#e8833a", "#d1495b"


def thin(steps: Sequence[int], values: Sequence[float | None]) -> tuple[list[int], list[float | None]]:
    """Reduce a line to at most 2·MAX_POINTS points: the lowest and the highest value of each bucket of steps."""
    if len(steps) <= 2 * MAX_POINTS:
        return list(steps), list(values)
    keep: list[int] = []
    for bucket in range(MAX_POINTS):
        start, stop = (len(steps) * b // MAX_POINTS for b in (bucket, bucket + 1))
        finite = [(value, i) for i in range(start, stop) if (value := values[i]) is not None]
        keep += sorted({min(finite)[1], max(finite)[1]}) if finite else [start]
    return [steps[i] for i in keep], [values[i] for i in keep]


def loss_figure(run: RunData) -> dict[str, Any] | None:
    """Draw the loss over steps with adoptions, guard events and validation. Returns None without a loss."""
    steps, losses = run.series("loss")
    if not any(loss is not None for loss in losses):
        return None
    figure = new_figure("loss", rangemode="normal")
    x, y = thin(steps, losses)
    figure.add_scatter(x=x, y=y, name="training loss", mode="lines", line={"color": LINE, "width": 1.6})
    validations = run.validations()
    for formats, colour in zip(validations, (STAGE_COLOURS[2], STAGE_COLOURS[3]), strict=False):
        marker = {"symbol": "circle-open", "size": 8, "color": colour, "line": {"width": 2}}
        mode = "markers" if len(validations[formats]) <= 40 else "lines"
        x, y = thin(list(validations[formats]), list(validations[formats].values()))
        name = "validation in bf16" if formats == "bf16" else "validation"
        figure.add_scatter(x=x, y=y, name=name, mode=mode, marker=marker, line={"color": colour})
    on_curve = _Curve(steps, losses)
    texts = [_adoption_text(a) for a in run.adoptions]
    _add_marks(figure, "map adopted", [a.step for a in run.adoptions], texts, on_curve, MARK, "diamond")
    guards = [e for e in run.events if e["event"] == "guard"]
    texts = [html.escape(f"guard: {e.get('reason', '')}") for e in guards]
    _add_marks(figure, "guard", [e["step"] for e in guards], texts, on_curve, FAULT, "x")
    drifts = [e for e in run.events if e["event"] == "trigger"]
    texts = [html.escape(f"update triggered: {e.get('reason', '')}") for e in drifts]
    _add_marks(
        figure, "update triggered", [e["step"] for e in drifts], texts, on_curve, STAGE_COLOURS[3], "triangle-up"
    )
    # All at once: add_vline takes time in proportion to the lines before it, minutes for a long run.
    figure.update_layout(shapes=[_dotted_line(adoption.step) for adoption in run.adoptions])
    return plain(figure)


def _dotted_line(step: int) -> dict[str, Any]:
    """Return a vertical line over the height of the figure."""
    place = {"xref": "x", "x0": step, "x1": step, "yref": "y domain", "y0": 0, "y1": 1}
    return {"type": "line", **place, "line": {"color": MARK, "width": 1, "dash": "dot"}, "opacity": 0.6}


def share_figure(
    run: RunData, target: float | None, shares: Sequence[Mapping[str, float]] | None = None
) -> dict[str, Any] | None:
    """Draw the fp4 share over steps, of the whole model and of each pipeline stage.

    Args:
        run: the run.
        target: the wanted share; None for another kind of budget.
        shares: for each adoption, stage → share; None for the shares in the ``adopt`` events.

    Returns:
        The figure, or None if the run recorded no share.
    """
    steps, values = run.series("fp4_fraction")
    shares = [a.achieved_per_stage for a in run.adoptions] if shares is None else shares
    stages = list(dict.fromkeys(stage for by_stage in shares for stage in by_stage))
    if not any(value is not None for value in values) and not run.adoptions:
        return None
    figure = new_figure("fp4 share of FLOPs", rangemode="tozero")
    figure.update_yaxes(tickformat=".0%", range=[0, 1.02])
    if steps:
        x, y = thin(steps, values)
    else:
        x, y = [a.step for a in run.adoptions], [a.achieved for a in run.adoptions]
    # A broad, pale line stays visible under the stages' thin lines, which often coincide with it.
    line = {"color": "rgba(63,131,200,0.45)", "width": 6, "shape": "hv"}
    figure.add_scatter(x=x, y=y, name="whole model", mode="lines", line=line, hovertemplate="%{y:.2%}")
    end = max([*steps[-1:], *(a.step for a in run.adoptions[-1:])], default=0)
    if len(stages) > 1:
        add_stages(figure, [a.step for a in run.adoptions], shares, end)
    if target is not None and run.adoptions:
        line = {"color": FAULT, "width": 1.2, "dash": "dash"}
        ends = [min([*steps[:1], run.adoptions[0].step]), end]
        figure.add_scatter(x=ends, y=[target] * 2, name="target", mode="lines", line=line, hoverinfo="skip")
    return plain(figure)


def add_stages(figure: Any, steps: Sequence[int], shares: Sequence[Mapping[str, float]], end: int) -> None:
    """Add one line for each pipeline stage. A share holds from its step to the next one, the last one until ``end``."""
    for i, stage in enumerate(dict.fromkeys(stage for by_stage in shares for stage in by_stage)):
        values = [by_stage.get(stage) for by_stage in shares]
        figure.add_scatter(
            x=[*steps, end],
            y=[*values, values[-1]],
            name=f"stage {html.escape(stage)}",
            mode="lines+markers",
            line={"color": STAGE_COLOURS[(i + 1) % len(STAGE_COLOURS)], "width": 1.2, "shape": "hv"},
            marker={"size": 5},
            hovertemplate="%{y:.2%}",
        )


def timing_figure(updates: Sequence[Update]) -> dict[str, Any] | None:
    """Draw the times of each update: a stacked bar of its parts, and a bar of the time that it blocked training.

    Returns None if no update has times.
    """
    if not any(u.collect_s or u.probes_s or u.latency_s or u.solve_s or u.wait_s for u in updates):
        return None
    figure = new_figure("seconds", rangemode="tozero")
    figure.update_layout(barmode="stack", bargap=0.3)
    figure.update_xaxes(title_text="update", type="category")
    parts: list[tuple[str, list[float | None], str, str]] = [
        ("collect", [u.collect_s for u in updates], "#7fb2e5", "parts")
    ]
    kinds = list(dict.fromkeys(kind for u in updates for kind in u.probes_s))
    blues = ("#3f83c8", "#2a5d95", "#1d3f66")
    for i, kind in enumerate(kinds):
        name = f"probe: {html.escape(kind.replace('_', ' '))}"
        parts.append((name, [u.probes_s.get(kind) for u in updates], blues[i % len(blues)], "parts"))
    lags = [None if u.latency_s is None else max(0.0, u.latency_s - (u.solve_s or 0.0)) for u in updates]
    parts += [
        ("solve", [u.solve_s for u in updates], "#c9a227", "parts"),
        ("rest of the sidecar's lag", lags, "#e6d08a", "parts"),
        ("training blocked", [u.wait_s for u in updates], FAULT, "blocked"),
    ]
    for name, seconds, colour, group in parts:
        if any(value is not None for value in seconds):
            figure.add_bar(
                x=[u.name for u in updates],
                y=seconds,
                name=name,
                offsetgroup=group,
                marker={"color": colour},
                hovertemplate="%{y:.3g} s",
            )
    return plain(figure)


def front_figure(front: Front | None) -> dict[str, Any] | None:
    """Draw the sum of losses over budgets of one Problem, and mark the run's own budget and map.

    Returns None without a front.
    """
    if front is None or not front.points:
        return None
    figure = new_figure("predicted loss (Σ of the choices' scores)", rangemode="tozero")
    figure.update_layout(hovermode="closest")
    share = front.kind == "target"
    title = "share of FLOPs in fp4" if share else "predicted speedup of the decoder's linears"
    figure.update_xaxes(title_text=title, tickformat=".0%" if share else ".2f")
    figure.update_yaxes(exponentformat="e")
    form = "{:.2%}" if share else "{:.3f}"
    figure.add_scatter(
        x=[p.x for p in front.points],
        y=[p.loss for p in front.points],
        text=[_point_text(p, form) for p in front.points],
        name="least loss of any map",
        mode="lines+markers",
        line={"color": LINE, "width": 1.6},
        marker={"size": 6, "symbol": ["circle" if p.proven else "circle-open" for p in front.points]},
        hovertemplate="%{text}<extra></extra>",
    )
    kind, wanted = front.asked
    line = {"color": FAULT, "width": 1.2, "dash": "dash"}
    if kind == "loss":
        figure.add_hline(y=wanted, line=line)
    else:
        figure.add_vline(x=wanted, line=line)
    figure.add_scatter(x=[None], y=[None], name="asked", mode="lines", line=line)
    if front.chosen is not None:
        x, loss = front.chosen
        text = f"the run's map: {form.format(x)}, loss {loss:.4g}"
        marker = {"color": MARK, "size": 11, "symbol": "diamond"}
        hover = "%{text}<extra></extra>"
        figure.add_scatter(
            x=[x], y=[loss], text=[text], name="the run's map", mode="markers", marker=marker, hovertemplate=hover
        )
    return plain(figure)


def _point_text(point: Point, form: str) -> str:
    shares = ", ".join(f"{fmt.value} {share:.1%}" for fmt, share in point.shares.items())
    proven = "" if point.proven else "<br>not proven optimal"
    return f"{form.format(point.x)}, loss {point.loss:.4g}<br>{shares} of the cost{proven}"


class _Curve:
    """The height of the loss curve at a step: the first finite loss at or after the step, else the last one."""

    def __init__(self, steps: Sequence[int], losses: Sequence[float | None]) -> None:
        self._points = [(step, loss) for step, loss in zip(steps, losses, strict=True) if loss is not None]

    def __call__(self, step: int) -> float:
        return next((loss for s, loss in self._points if s >= step), self._points[-1][1])


def _adoption_text(adoption: Any) -> str:
    achieved = "" if adoption.achieved is None else f"<br>fp4 share {adoption.achieved:.2%}"
    if adoption.asked is not None:
        achieved += f"<br>asked {html.escape(adoption.asked)}"
        achieved += "" if adoption.speedup is None else f", predicted speedup {adoption.speedup:.3f}"
        achieved += "" if adoption.loss is None else f", predicted loss {adoption.loss:.3g}"
    changed = adoption.fields.get("changed")
    changes = "" if number(changed) is None else f"<br>{int(changed)} choices changed"
    version = "" if adoption.version is None else f" v{adoption.version}"
    return f"map{version}: {html.escape(adoption.status)}{achieved}{changes}"


def _add_marks(
    figure: Any, name: str, steps: list[int], texts: list[str], curve: _Curve, colour: str, symbol: str
) -> None:
    if steps:
        figure.add_scatter(
            x=steps,
            y=[curve(step) for step in steps],
            text=texts,
            name=name,
            mode="markers",
            marker={"color": colour, "size": 9, "symbol": symbol},
            hovertemplate="%{text}",
        )


def new_figure(y_title: str, rangemode: str) -> Any:
    """Return an empty figure in the style of the pages, with training steps on the x axis."""
    figure = go.Figure(layout={"template": "none"})
    figure.update_layout(
        hovermode="x unified",
        margin={"l": 56, "r": 12, "t": 32, "b": 44},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        showlegend=True,
    )
    figure.update_xaxes(title_text="training step")
    figure.update_yaxes(title_text=y_title, rangemode=rangemode)
    return figure


def plain(figure: Any) -> dict[str, Any]:
    """Return the data and layout of a figure without plotly's template. The page's theme sets the colours."""
    body: dict[str, Any] = figure.to_plotly_json()
    body["layout"].pop("template", None)
    return body

"""``blame_<STEP>.html``, the page about a verdict of ``snip blame``: one file without scripts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from markupsafe import Markup

from snip_megatron import __version__
from snip_megatron.precision import Gemm, LinearId
from snip_megatron.reporting.pages import page_template, template_text
from snip_megatron.runtime.storage import deliver
from snip_megatron.sensitivity.blame import PASSES, Blame

_PASSES = {"bf16": "bf16", "reference": "exact formats", "kernels": "kernels"}
_CELL, _HEIGHT, _LEFT, _TOP, _GAP = 18, 13, 30, 54, 5
"""Width and height of a cell of the grid, room for the layers' numbers and for the linears' names, gap between
linears, in units of the picture."""


def write_blame_page(blame: Blame, path: Path) -> None:
    """Write the page of a verdict. Raises SnipError if the file cannot be written."""
    deliver("page", path, blame_page(blame))


def blame_page(blame: Blame) -> str:
    """Return the page of a verdict."""
    return page_template("blame.html").render(
        version=__version__,
        style=Markup(template_text("report.css")),
        blame=blame,
        reason=blame.reason if "." in blame.reason.partition(" ")[0] else blame.reason[:1].upper() + blame.reason[1:],
        title=f"Step {blame.step}: {blame.title}",
        verdict=blame.title.capitalize(),
        passes=[(_PASSES[name], blame.passes[name]) for name in PASSES if name in blame.passes],
        grid=_grid(blame),
        thresholds=blame.thresholds or {},
    )


# -- the model as a grid -----------------------------------------------------------------------------------------------
def _grid(blame: Blame) -> dict[str, Any] | None:
    """Return the picture of the GEMMs that the verdict has figures of: layers down, linears and their GEMMs across.

    Each of ``cells`` has its corner, its colour and the text of its tooltip. None without figures.
    """
    if not blame.harm:
        return None
    linears = {harm.linear: LinearId.parse(harm.linear) for harm in blame.harm}
    layers = list(dict.fromkeys((linear.stack, linear.layer) for linear in linears.values()))
    paths = list(dict.fromkeys(linear.path for linear in linears.values()))
    gemms, largest = [gemm.value for gemm in Gemm], max(harm.share for harm in blame.harm)
    blamed = {(culprit.linear, culprit.gemm) for culprit in blame.culprits if culprit.confirmed}
    if blame.bug is not None:
        blamed |= {(blame.bug.linear, gemm) for gemm in ([blame.bug.gemm] if blame.bug.gemm else gemms)}
    column_x = [_LEFT + column * (3 * _CELL + _GAP) for column in range(len(paths) + 1)]
    cells = []
    for harm in blame.harm:
        linear = linears[harm.linear]
        kernel = "" if harm.sqnr_of_kernel is None else f", kernel {harm.sqnr_of_kernel:.0f} dB"
        cells.append(
            {
                "x": column_x[paths.index(linear.path)] + gemms.index(harm.gemm) * _CELL,
                "y": _TOP + layers.index((linear.stack, linear.layer)) * _HEIGHT,
                "opacity": math.sqrt(max(0.0, harm.share) / largest) if largest > 0 else 0.0,
                "is_bf16": harm.format == "bf16",
                "is_blamed": (harm.linear, harm.gemm) in blamed,
                "text": f"{harm.linear}:{harm.gemm}, {harm.format}: {harm.share:.1%} of the harm{kernel}",
            }
        )
    names = [path.rpartition(".")[2].removeprefix("linear_") for path in paths]
    labels = [str(layer) if stack == "decoder" else f"{stack[0]}{layer}" for stack, layer in layers]
    return {
        "width": column_x[-1],
        "height": _TOP + len(layers) * _HEIGHT + 4,
        "cell": (_CELL - 1, _HEIGHT - 1),
        "cells": cells,
        "columns": [(x + 3 * _CELL // 2, name) for x, name in zip(column_x, names, strict=False)],
        "rows": [(_TOP + row * _HEIGHT, label) for row, label in enumerate(labels)],
    }

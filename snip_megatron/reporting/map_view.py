"""The maps of a run as compact data for the page's grid. Columns are layers; rows are kinds of linears × GEMMs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from snip_megatron.precision import Format, Gemm, LinearId, PrecisionMap, option_id, split_option_id
from snip_megatron.records.run_data import Adoption, number
from snip_megatron.reporting.figures import FORMAT_COLOURS

SCORE_FIELDS = ("delta_loss", "delta_weight", "q")


def map_payload(adoptions: Sequence[Adoption]) -> dict[str, Any] | None:
    """Return the data that the page's script draws, or None if no adopted map is known.

    ``rows`` [R] holds objects {stack, path, gemm, label}. ``layers`` [C] holds global layer indices. Each of ``maps``
    has ``codes`` [R][C] (an index into ``formats``; null if the model has no such linear), ``changed`` (the number of
    changed GEMMs; null for the first map) and ``scores`` (an index into the list ``scores``; null if unknown). Each
    entry of the list ``scores`` [R][C] holds {format: [ΔL, ΔW, Q]}.
    """
    known = [a for a in adoptions if a.precision_map is not None and a.precision_map.choices]
    keys = dict.fromkeys(key for a in known if a.precision_map for key in a.precision_map.choices)
    linears = dict.fromkeys(split_option_id(key)[0] for key in keys)  # in the model's order
    if not linears:
        return None
    present = {str(linear) for linear in linears}
    layers = sorted({linear.layer for linear in linears})
    kinds = dict.fromkeys((linear.stack, linear.path) for linear in linears)
    rows = [(kind, gemm) for kind in kinds for gemm in Gemm]
    cells = [[(str(LinearId(stack, layer, path)), gemm) for layer in layers] for (stack, path), gemm in rows]
    tables = {id(a.scores): a.scores for a in known if a.scores}  # a map that the guard restored shares its scores
    maps: list[dict[str, Any]] = []
    before: list[list[int | None]] | None = None
    for adoption in known:
        chosen = adoption.precision_map or PrecisionMap(choices={})
        codes = [[chosen.format_of(*cell).code if cell[0] in present else None for cell in row] for row in cells]
        pairs = [] if before is None else zip(itertools.chain(*before), itertools.chain(*codes), strict=True)
        named = ("step", "version", "status", "achieved", "speedup")
        own = {
            "codes": codes,
            "changed": None if before is None else sum(a != b for a, b in pairs),
            "scores": list(tables).index(id(adoption.scores)) if adoption.scores else None,
        }
        maps.append({name: getattr(adoption, name) for name in named} | own)
        before = codes
    return {
        "formats": [{"name": fmt.value, "colour": FORMAT_COLOURS[fmt]} for fmt in Format],
        "rows": [
            {"stack": k[0], "path": k[1], "gemm": g.value, "label": f"{_short_kind(*k)} · {g.value}"} for k, g in rows
        ],
        "layers": layers,
        "maps": maps,
        "scores": [[[_cell(table, *cell) for cell in row] for row in cells] for table in tables.values()],
    }


def _short_kind(stack: str, path: str) -> str:
    """Return a short name of the linears of one path: without the module that the layer consists of."""
    *owners, last = path.split(".")
    return " ".join([*([] if stack == "decoder" else [stack]), *owners[1:], last.removeprefix("linear_")])


def _cell(scores: Mapping[str, Any], linear: str, gemm: Gemm) -> dict[str, list[float | None]] | None:
    options = scores.get(option_id(linear, gemm), scores.get(linear))  # at granularity layer, those of the linear
    if not isinstance(options, Mapping):
        return None
    return {
        fmt.value: [None if (x := number(option.get(name))) is None else float(f"{x:.3e}") for name in SCORE_FIELDS]
        for fmt in Format
        if isinstance(option := options.get(fmt.value), Mapping)
    }

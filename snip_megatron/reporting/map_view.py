"""The maps of a run as compact data for the page's grid. Columns are layers; rows are kinds of linears × GEMMs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from snip_megatron.precision import Format, Gemm, LinearId, PrecisionMap, option_id, split_option_id
from snip_megatron.records.run_data import Adoption, number
from snip_megatron.reporting.figures import FORMAT_COLOURS

_Row = tuple[tuple[str, str], Gemm]  # (stack, path), GEMM
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
    tables = {id(a.scores): a.scores for a in known if a.scores}  # a map that the guard restored shares its scores
    maps: list[dict[str, Any]] = []
    for adoption in known:
        codes = _codes(adoption.precision_map, rows, layers, present) if adoption.precision_map else []
        maps.append(
            {
                "step": adoption.step,
                "version": adoption.version,
                "status": adoption.status,
                "achieved": adoption.achieved,
                "speedup": adoption.speedup,
                "codes": codes,
                "changed": _count_changes(maps[-1]["codes"], codes) if maps else None,
                "scores": list(tables).index(id(adoption.scores)) if adoption.scores else None,
            }
        )
    return {
        "formats": [{"name": fmt.value, "colour": FORMAT_COLOURS[fmt]} for fmt in Format],
        "rows": [
            {"stack": k[0], "path": k[1], "gemm": g.value, "label": f"{_short_kind(*k)} · {g.value}"} for k, g in rows
        ],
        "layers": layers,
        "maps": maps,
        "scores": [_scores(table, rows, layers) for table in tables.values()],
    }


def _short_kind(stack: str, path: str) -> str:
    """Return a short name of the linears of one path: without the module that the layer consists of."""
    *owners, last = path.split(".")
    return " ".join([*([] if stack == "decoder" else [stack]), *owners[1:], last.removeprefix("linear_")])


def _codes(
    precision_map: PrecisionMap, rows: Sequence[_Row], layers: Sequence[int], present: set[str]
) -> list[list[int | None]]:
    """Return the format codes [R][C]."""
    return [
        [
            precision_map.format_of(name, gemm).code
            if (name := str(LinearId(kind[0], layer, kind[1]))) in present
            else None
            for layer in layers
        ]
        for kind, gemm in rows
    ]


def _count_changes(old: list[list[int | None]], new: list[list[int | None]]) -> int:
    return sum(a != b for row, other in zip(old, new, strict=True) for a, b in zip(row, other, strict=True))


def _scores(
    scores: Mapping[str, Any], rows: Sequence[_Row], layers: Sequence[int]
) -> list[list[dict[str, list[float | None]] | None]]:
    """Return the scores [R][C]. Under granularity ``layer``, each GEMM of a linear has the scores of the linear."""
    return [[_cell(scores, str(LinearId(kind[0], layer, kind[1])), gemm) for layer in layers] for kind, gemm in rows]


def _cell(scores: Mapping[str, Any], linear: str, gemm: Gemm) -> dict[str, list[float | None]] | None:
    options = scores.get(option_id(linear, gemm), scores.get(linear))
    if not isinstance(options, Mapping):
        return None
    return {
        fmt.value: [_short(option.get(name)) for name in SCORE_FIELDS]
        for fmt in Format
        if isinstance(option := options.get(fmt.value), Mapping)
    }


def _short(value: Any) -> float | None:
    """Return four significant digits, as many as the page shows. This makes the page smaller."""
    finite = number(value)
    return None if finite is None else float(f"{finite:.3e}")

"""Globs over options."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from snip_megatron.precision import Gemm, option_id


def matching_options(glob: str, linears: Sequence[str], granularity: str) -> list[tuple[str, Gemm | None]]:
    """Return (linear, GEMM) of the options that ``glob`` matches; the GEMM is None at granularity ``layer``.

    The glob is case-sensitive. It is matched against ``<linear>`` and, at granularity ``gemm``, against
    ``<linear>:<gemm>``.
    """
    return [
        (name, gemm)
        for name in linears
        for gemm in _gemms(granularity)
        if fnmatchcase(name, glob) or fnmatchcase(option_id(name, gemm), glob)
    ]


def _gemms(granularity: str) -> tuple[Gemm | None, ...]:
    return tuple(Gemm) if granularity == "gemm" else (None,)


def no_match_hint(what: str, glob: str, linears: Sequence[str], granularity: str) -> str:
    """Return what to tell a user whose glob matches no option. ``what`` names the argument."""
    if granularity == "layer" and ":" in glob:
        return f"at granularity layer {what} names linears, not GEMMs"
    if not linears:
        return "the model has no candidate linear"
    return f"the first option is {option_id(linears[0], _gemms(granularity)[0])}"

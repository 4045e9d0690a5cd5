"""Globs over options, and the pins that fix the formats of what they match."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from snip_megatron.errors import SnipError, cut
from snip_megatron.precision import Format, Gemm, misplaced, option_id, split_option_id


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


def pinned_formats(
    linears: Iterable[str], pins: Iterable[tuple[str, str]], granularity: str = "gemm"
) -> dict[str, str]:
    """Return option id → format of every option that a pin fixes. The last matching pin wins.

    Raises SnipError if a pin matches nothing, or a GEMM that cannot run in its format.
    """
    names = list(linears)
    fixed: dict[str, str] = {}
    for glob, fmt in pins:
        keys = [option_id(name, gemm) for name, gemm in matching_options(glob, names, granularity)]
        if not keys:
            hint = no_match_hint("a pin", glob, names, granularity)
            raise SnipError(f"--snip-pin {cut(glob)}={fmt}: matches no option; {hint}")
        for key in keys:
            if (why := misplaced(Format(fmt), split_option_id(key)[1])) is not None:
                raise SnipError(f"--snip-pin {cut(glob)}={fmt}: matches {key}, and {why}")
        fixed |= dict.fromkeys(keys, fmt)
    return fixed

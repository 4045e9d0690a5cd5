"""Globs over options, and options that must share a format (``--snip-group``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from snip_megatron.errors import SnipError, cut
from snip_megatron.precision import Gemm, LinearId, option_id

PER_BLOCK = "block:"
"""Prefix of a ``--snip-group`` argument that makes one group in each block of the decoder instead of one in all."""


def option_groups(
    linears: Iterable[str], specs: Iterable[str], granularity: str = "gemm", prefix: str = "--snip-"
) -> dict[str, str]:
    """Return option id → name of its group. Options without a group are left out.

    All options that a spec matches share a format with those of the same GEMM: fprops with fprops, dgrads with dgrads,
    wgrads with wgrads. At granularity ``layer``, linears share a format with linears. Groups that have an option in
    common become one.

    Args:
        linears: names of the linears.
        specs: arguments of the form ``GLOB`` or ``block:GLOB``.
        granularity: ``gemm`` or ``layer``.
        prefix: prefix of the command's arguments, for errors.

    Raises:
        SnipError: a spec matches nothing.
    """
    names = list(linears)
    members: dict[str, list[str]] = {}
    for spec in specs:
        glob = spec.removeprefix(PER_BLOCK)
        matched = matching_options(glob, names, granularity)
        if not matched:
            hint = no_match_hint("a group", glob, names, granularity)
            raise SnipError(f"{prefix}group {cut(spec)}: matches no option; {hint}")
        for name, gemm in matched:
            block = f" in block {LinearId.parse(name).layer}" if spec.startswith(PER_BLOCK) else ""
            members.setdefault(f"{spec}{block}{'' if gemm is None else f' {gemm.value}'}", []).append(
                option_id(name, gemm)
            )
    return _merged(members)


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


def _merged(members: Mapping[str, list[str]]) -> dict[str, str]:
    """Merge groups that share an option. The name of the merged group consists of all their names."""
    parent = {name: name for name in members}

    def root(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    owner: dict[str, str] = {}
    for name, keys in members.items():
        for key in keys:
            parent[root(name)] = root(owner.setdefault(key, name))
    joined: dict[str, list[str]] = {}
    for name in members:
        joined.setdefault(root(name), []).append(name)
    return {key: " and ".join(joined[root(name)]) for key, name in owner.items()}


def spread_pins(pinned: Mapping[str, str], groups: Mapping[str, str], prefix: str = "--snip-") -> dict[str, str]:
    """Return ``pinned``, extended to all options of every group with a pinned option.

    ``prefix`` is that of the command's arguments, for errors. Raises SnipError, naming both options, if pins give two
    formats to one group.
    """
    first: dict[str, str] = {}
    for key in pinned:
        if key not in groups:
            continue
        other = first.setdefault(groups[key], key)
        if pinned[other] != pinned[key]:
            raise SnipError(
                f"{prefix}group {cut(groups[key])}: {prefix}pin fixes {other} to {pinned[other]} and {key} to"
                f" {pinned[key]}, but a group shares one format; change a pin or the group"
            )
    return {**pinned, **{key: pinned[first[group]] for key, group in groups.items() if group in first}}

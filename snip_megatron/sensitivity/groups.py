"""Options that must share a format (``--snip-group``): which they are, and what pins make of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from snip_megatron.errors import SnipError
from snip_megatron.precision import Gemm, LinearId, option_id

PER_BLOCK = "block:"
"""A group argument that begins so makes one group in every block of the decoder, instead of one in all."""


def option_groups(linears: Iterable[str], specs: Iterable[str], granularity: str = "gemm") -> dict[str, str]:
    """Option id → name of its group; options without one are left out.

    A spec is ``GLOB`` or ``block:GLOB``. The glob is matched, case-sensitive, against ``<linear>`` and, at granularity
    ``gemm``, against ``<linear>:<gemm>``. All options that match share a format with those of the same GEMM: fprops
    with fprops, dgrads with dgrads, wgrads with wgrads; at granularity ``layer``, linears with linears. Groups with an
    option in common become one. Raises SnipError on a spec that matches nothing.
    """
    names = list(linears)
    gemms = tuple(Gemm) if granularity == "gemm" else (None,)
    members: dict[str, list[str]] = {}
    for spec in specs:
        glob = spec.removeprefix(PER_BLOCK)
        found = False
        for name in names:
            block = f" in block {LinearId.parse(name).layer}" if spec.startswith(PER_BLOCK) else ""
            for gemm in gemms:
                key = option_id(name, gemm)
                if fnmatchcase(name, glob) or fnmatchcase(key, glob):
                    found = True
                    members.setdefault(f"{spec}{block}{'' if gemm is None else f' {gemm.value}'}", []).append(key)
        if not found:
            raise SnipError(f"--snip-group {spec}: matches no option; {_hint(glob, names, granularity)}")
    return _merged(members)


def _hint(glob: str, names: list[str], granularity: str) -> str:
    if granularity == "layer" and ":" in glob:
        return "at granularity layer a group names linears, not GEMMs"
    return f"the first linear is {names[0]}" if names else "the model has no candidate linear"


def _merged(members: Mapping[str, list[str]]) -> dict[str, str]:
    """Groups that share an option become one, of all their names."""
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


def spread_pins(pinned: Mapping[str, str], groups: Mapping[str, str]) -> dict[str, str]:
    """``pinned`` with every option of a group that a pin touches: they share its format.

    Raises SnipError, naming both options, where pins give one group two formats.
    """
    first: dict[str, str] = {}
    for key in pinned:
        if key not in groups:
            continue
        other = first.setdefault(groups[key], key)
        if pinned[other] != pinned[key]:
            raise SnipError(
                f"--snip-group {groups[key]}: --snip-pin fixes {other} to {pinned[other]} and {key} to {pinned[key]},"
                " but a group shares one format; change a pin or the group"
            )
    return {**pinned, **{key: pinned[first[group]] for key, group in groups.items() if group in first}}

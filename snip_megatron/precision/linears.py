"""Names of linears, the rows that describe them, keys of choices, and pins that fix the formats of what they match.

A choice has the key ``<linear>:<fprop|dgrad|wgrad>`` at granularity ``gemm``, or ``<linear>`` at granularity ``layer``,
where the three GEMMs of a linear share one format. The name of a linear is ``<stack>.layers.<0-based global index>.
<path of the module in the layer>``. It is the same on every parallel layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from snip_megatron.precision.errors import SnipError, cut, quoted
from snip_megatron.precision.formats import Format, Gemm, misplaced

_NAME = re.compile(r"(decoder|mtp)\.layers\.(0|[1-9][0-9]{0,5})\.([A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*)\Z")

DENSE_LAYER = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
"""Paths of the linears of a layer of attention and a dense MLP, in the order of the forward pass: the layers of models
that ``snip plan`` knows by name, and of a plain torch loop.
"""


@dataclass(frozen=True, order=True)
class LinearId:
    """Identity of a linear. One name stands for the same linear of all routed experts of a layer.

    ``stack`` is ``decoder``, or ``mtp`` for the layers of multi-token prediction. ``layer`` is the global 0-based index
    in its stack, ``path`` that of the module in the layer.
    """

    stack: str
    layer: int
    path: str

    def __str__(self) -> str:
        return f"{self.stack}.layers.{self.layer}.{self.path}"

    @classmethod
    def parse(cls, name: str) -> LinearId:
        """Parse a name; the inverse of ``str``. Raises SnipError if ``name`` is not the name of a linear."""
        match = _NAME.match(name)
        if match is None:
            raise SnipError(f"{quoted(name)} is not the name of a decoder linear (decoder.layers.<n>.<module>)")
        return cls(match[1], int(match[2]), match[3])


class Role(StrEnum):
    """What a linear does in its residual sub-block."""

    READS = "reads"  # its input is the residual stream, after a norm
    BETWEEN = "between"
    WRITES = "writes"  # its output is added to the residual stream


class Side(StrEnum):
    """What tensor parallel ranks share of a linear."""

    OUTPUT = "output"  # W [N, K] along N
    INPUT = "input"  # W along K
    NEITHER = "neither"


@dataclass(frozen=True)
class LinearRow:
    """One linear of the model.

    A linear of experts stands for ``experts`` matrices, and its sums of squares are over all of them. If ``sub_block``
    is left out, ``sub_block``, ``role`` and ``sharded`` are those of a decoder of attention (sub-block 2·layer) and MLP
    (2·layer + 1).
    """

    name: str
    stage: int  # of the pipeline
    n: int  # global (unsharded) shape of W [n, k]
    k: int
    experts: int = 1  # number of matrices
    active: int = 1  # number of those matrices that a token goes through
    sub_block: int = -1  # residual sub-block, and boundary at its input. The boundary at its output is the next one
    role: Role = Role.WRITES
    trained: bool = True  # whether its weight has a gradient. A frozen linear has no wgrad
    sharded: Side = Side.INPUT  # what tensor parallel ranks share

    def __post_init__(self) -> None:
        if self.sub_block < 0:
            linear = self.id
            reads = linear.path.endswith(("linear_qkv", "linear_fc1"))
            second = not linear.path.startswith("self_attention.")
            object.__setattr__(self, "sub_block", 2 * linear.layer + second)
            object.__setattr__(self, "role", Role.READS if reads else Role.WRITES)
            object.__setattr__(self, "sharded", Side.OUTPUT if reads else Side.INPUT)

    @property
    def id(self) -> LinearId:
        return LinearId.parse(self.name)

    @property
    def elements(self) -> float:
        return float(self.n) * self.k * self.experts

    @property
    def flops(self) -> float:
        """FLOPs of one of its GEMMs for one token."""
        return 2.0 * self.n * self.k * self.active

    def runs(self, gemm: Gemm | None) -> int:
        """Return how many of its GEMMs run for a choice of one GEMM, or of all (None)."""
        if gemm is None:
            return len(Gemm) if self.trained else len(Gemm) - 1
        return int(self.trained or gemm is not Gemm.WGRAD)


def option_id(linear: str, gemm: Gemm | None) -> str:
    """Return the key of a choice: ``<linear>:<gemm>``, or ``<linear>`` if ``gemm`` is None (granularity ``layer``)."""
    return linear if gemm is None else f"{linear}:{gemm.value}"


def split_option_id(key: str) -> tuple[LinearId, Gemm | None]:
    """Split the key of a choice; the inverse of :func:`option_id`. Raises SnipError if ``key`` is not such a key."""
    name, colon, gemm = key.partition(":")
    linear = LinearId.parse(name)
    if not colon:
        return linear, None
    try:
        return linear, Gemm(gemm)
    except ValueError:
        raise SnipError(f"choice {quoted(key)}: {quoted(gemm)} is not one of fprop, dgrad, wgrad") from None


# -- globs -----------------------------------------------------------------------------------------------------------
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
) -> dict[str, Format]:
    """Return option id → format of every option that a pin fixes. The last matching pin wins.

    Raises SnipError if a pin matches nothing, or a GEMM that cannot run in its format.
    """
    names = list(linears)
    fixed: dict[str, Format] = {}
    for glob, fmt in pins:
        keys = [option_id(name, gemm) for name, gemm in matching_options(glob, names, granularity)]
        if not keys:
            hint = no_match_hint("a pin", glob, names, granularity)
            raise SnipError(f"--snip-pin {cut(glob)}={fmt}: matches no option; {hint}")
        for key in keys:
            if (why := misplaced(Format(fmt), split_option_id(key)[1])) is not None:
                raise SnipError(f"--snip-pin {cut(glob)}={fmt}: matches {key}, and {why}")
        fixed |= dict.fromkeys(keys, Format(fmt))
    return fixed

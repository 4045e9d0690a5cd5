"""Names of linears, and keys of choices.

A choice has the key ``<linear>:<fprop|dgrad|wgrad>`` at granularity ``gemm``, or ``<linear>`` at granularity ``layer``,
where the three GEMMs of a linear share one format. The name of a linear is ``decoder.layers.<0-based global
index>.<kind>``. It is the same on every parallel layout.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from snip_megatron.errors import SnipError, quoted
from snip_megatron.precision.formats import Gemm

LINEAR_KINDS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
"""Kinds of the linears of a dense decoder layer, in the order of the forward pass."""
EXPERT_KINDS = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")
"""Kinds that replace the two MLP linears in a layer with a mixture of experts. One name stands for all experts of the
layer.
"""
_KINDS = "|".join(re.escape(k) for k in (*LINEAR_KINDS, *EXPERT_KINDS))
_NAME = re.compile(rf"decoder\.layers\.(0|[1-9][0-9]{{0,5}})\.({_KINDS})\Z")


@dataclass(frozen=True, order=True)
class LinearId:
    """Identity of a decoder linear.

    Attributes:
        layer: global 0-based index of the decoder layer.
        kind: one of LINEAR_KINDS or EXPERT_KINDS.
    """

    layer: int
    kind: str

    def __str__(self) -> str:
        return f"decoder.layers.{self.layer}.{self.kind}"

    @classmethod
    def parse(cls, name: str) -> LinearId:
        """Parse a name; the inverse of ``str``. Raises SnipError if ``name`` is not the name of a decoder linear."""
        match = _NAME.match(name)
        if match is None:
            raise SnipError(
                f"{quoted(name)} is not the name of a decoder linear (decoder.layers.<n>.<{'|'.join(LINEAR_KINDS)}>)"
            )
        return cls(int(match[1]), match[2])

    @property
    def sub_block(self) -> int:
        """Index of the residual sub-block: 2·layer for attention, 2·layer + 1 for the MLP.

        The residual boundary at the input of the sub-block has the same index.
        """
        return 2 * self.layer + (0 if self.kind.startswith("self_attention.") else 1)

    @property
    def is_first(self) -> bool:
        """Whether the linear reads the residual stream (qkv, fc1). The others write to it (proj, fc2)."""
        return self.kind.endswith(("linear_qkv", "linear_fc1"))

    @property
    def of_experts(self) -> bool:
        """Whether the name stands for one linear in each expert of the layer."""
        return self.kind in EXPERT_KINDS


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

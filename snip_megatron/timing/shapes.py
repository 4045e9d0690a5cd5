"""The shape of a linear as one rank runs it in a training step."""

from __future__ import annotations

from dataclasses import dataclass

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format

Formats = tuple[Format, Format, Format]
"""Formats of fprop, dgrad and wgrad."""

ALL_BF16: Formats = (Format.BF16,) * 3


@dataclass(frozen=True, slots=True)
class LinearShape:
    """The size of a linear as one rank runs it in one training step.

    Attributes:
        tokens: tokens of one microbatch, after the all-gather of sequence parallelism.
        n: rows of the rank's shard of W, its output features.
        k: columns of the rank's shard of W, its input features.
        microbatches: microbatches of a step on this rank. W is quantised once a step.
        gathered: whether X is gathered from token shards (column-parallel linears under sequence parallelism). fprop
            and wgrad then quantise it separately.
        forwards: 2 if activations are recomputed in the backward, else 1.
        fused_accumulation: whether Megatron's own linear, which runs where all GEMMs are bf16, adds ∇W to ``main_grad``
            in its GEMM. Otherwise it writes ∇W in bf16 and adds it in another kernel.
    """

    tokens: int
    n: int
    k: int
    microbatches: int = 1
    gathered: bool = False
    forwards: int = 1
    fused_accumulation: bool = True

    @property
    def flops(self) -> float:
        """FLOPs of one GEMM in one microbatch. The three GEMMs have equal FLOPs."""
        return 2.0 * self.tokens * self.n * self.k


COLUMN_PARALLEL = ("self_attention.linear_qkv", "mlp.linear_fc1", "mlp.experts.linear_fc1")


def local_shape(
    kind: str,
    n: int,
    k: int,
    *,
    tokens: int,
    tensor_parallel: int = 1,
    microbatches: int = 1,
    sequence_parallel: bool = False,
    recompute: bool = False,
    fused_accumulation: bool = True,
) -> LinearShape:
    """Return one rank's shape of a linear.

    Args:
        kind: the kind of linear, one of :data:`snip_megatron.precision.DENSE_LAYER`.
        n: output features of the whole linear.
        k: input features of the whole linear.
        tokens: sequence length × micro batch size.
        tensor_parallel: the tensor parallel size.
        microbatches: microbatches of a training step on one data parallel rank.
        sequence_parallel: whether sequence parallelism is on.
        recompute: whether the linear's forward runs again in the backward.
        fused_accumulation: see :class:`LinearShape`.

    Raises:
        SnipError: the features cannot be divided by the tensor parallel size.
    """
    column = kind in COLUMN_PARALLEL
    split = n if column else k
    if split % tensor_parallel:
        raise SnipError(f"{kind} [{n}, {k}]: {split} features cannot be split over {tensor_parallel} ranks")
    return LinearShape(
        tokens=tokens,
        n=n // tensor_parallel if column else n,
        k=k if column else k // tensor_parallel,
        microbatches=microbatches,
        gathered=column and sequence_parallel and tensor_parallel > 1,
        forwards=2 if recompute else 1,
        fused_accumulation=fused_accumulation,
    )

"""Rates of attention, memory and links, which do not depend on formats. They are measured, or assumed by default."""

import math
from dataclasses import dataclass

from snip_megatron.timing.cost_model import FLOPS_RATE, STATED_COPY, CostModel, accumulation_seconds
from snip_megatron.timing.log_grid import LogGrid

STATED_ATTENTION = 0.45
"""Assumed rate of causal attention as a share of the bf16 rate, if the table has no measurement."""
ELEMENTWISE = 0.75
"""Bandwidth of norms, SwiGLU, RoPE and additions as a share of a copy's."""
ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward divided by those of its forward."""


@dataclass(frozen=True)
class Links:
    """Achieved bandwidths of the network: bytes a second that one GPU sends within a node of so many GPUs, or between.

    By default they are those of H200s: two of them gathered 16 MiB at 136 to 197 GB/s each, and 64 MiB at 226 to 264.
    The default within a node lies in the first range, at a value with which trainings under tensor parallelism on two
    of them are predicted within 7 %; these trainings are therefore no independent evidence of it.
    """

    node_size: int = 8
    within: float = 180e9
    between: float = 40e9

    def of(self, ranks: int) -> float:
        """Return the bandwidth of a group that spans ``ranks`` consecutive GPUs."""
        return self.within if ranks <= self.node_size else self.between


class Rates:
    """Times of everything except the decoder's linears, from the cost model's table if it has one.

    ``gpu_memory`` are the bytes of a GPU's memory; None if no table has them.
    """

    def __init__(self, model: CostModel) -> None:
        table = model.table
        attention = {} if table is None else table.attention
        self.gpu_memory = None if table is None else table.memory
        self._measured_copy = None if table is None else table.copy_rate
        self._copy = STATED_COPY if self._measured_copy is None else self._measured_copy
        self._grid = LogGrid(attention, lambda size: _attention_flops(*size)) if attention else None

    def attention(self, sequence: int, heads: int, head_size: int, batch: int) -> tuple[float, float]:
        """Return the seconds of causal attention of ``batch`` sequences, forward and backward."""
        size = (sequence, heads, head_size)
        if self._grid is None:
            forward = batch * _attention_flops(*size) / (STATED_ATTENTION * FLOPS_RATE)
            return forward, ATTENTION_BACKWARD * forward
        return batch * self._grid.seconds(size, lambda row: row[0]), batch * self._grid.seconds(
            size, lambda row: row[1]
        )

    def memory(self, moved: float) -> float:
        """Return the seconds of element-wise kernels that read and write ``moved`` bytes."""
        return moved / (self._copy * ELEMENTWISE)

    def accumulation(self, parameters: float) -> float:
        """Return the seconds of a kernel that adds bf16 gradients to ``main_grad``."""
        return accumulation_seconds(parameters, self._measured_copy)

    def assumptions(self, links: Links) -> tuple[str, ...]:
        """Return the assumptions behind the times, a sentence each."""
        stated = f"stated at {STATED_ATTENTION * FLOPS_RATE / 1e12:.0f} TFLOP/s"
        attention = stated if self._grid is None else "as torch's fused kernel was measured"
        copy = "stated" if self._measured_copy is None else "measured"
        return (
            f"attention: causal, backward {ATTENTION_BACKWARD:g} × the forward's FLOPs, {attention}",
            f"norms, RoPE, SwiGLU, additions, embedding, loss, optimizer: bytes moved at {ELEMENTWISE:.0%} of a copy's"
            f" {self._copy / 1e12:.2f} TB/s ({copy})",
            f"links (stated), a GPU: {links.within / 1e9:g} GB/s within a node of {links.node_size},"
            f" {links.between / 1e9:g} GB/s between nodes",
        )


def _attention_flops(sequence: int, heads: int, head_size: int) -> float:
    """Return the FLOPs of the forward of one sequence: two GEMMs, of which half is masked."""
    return 2.0 * math.prod((sequence, sequence, heads, head_size))

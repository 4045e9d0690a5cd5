"""How fast what no format changes runs: attention, memory, links. Measured where a table has it, else as stated."""

from __future__ import annotations

import math
from dataclasses import dataclass

from snip_megatron.solver.costs import FLOPS_RATE, CostModel
from snip_megatron.solver.log_grid import LogGrid
from snip_megatron.solver.timing_model import TimingModel

STATED_ATTENTION = 0.45
"""Share of bf16's rate that causal attention reaches where nothing was measured, forward and backward."""
STATED_COPY = 4.0e12
"""Bytes a second of a copy where nothing was measured."""
ELEMENTWISE = 0.75
"""Share of a copy's bandwidth that norms, SwiGLU, RoPE and additions reach."""
ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward over its forward's."""


@dataclass(frozen=True)
class Links:
    """Bytes a second that one GPU sends: within a node, and between nodes.

    Attributes:
        node_size: GPUs a node. within, between: achieved bandwidths.
    """

    node_size: int = 8
    within: float = 350e9
    between: float = 40e9

    def of(self, ranks: int) -> float:
        """Bandwidth of a group that spans ``ranks`` consecutive GPUs."""
        return self.within if ranks <= self.node_size else self.between


class Rates:
    """Times of what is not a decoder linear.

    Args:
        model: the cost model; its table, if it has one, also says how fast attention and memory are.
    """

    def __init__(self, model: CostModel) -> None:
        table = model.table if isinstance(model, TimingModel) else None
        self.measured_attention = bool(table and table.attention)
        self._copy = table.copy_rate if table is not None and table.copy_rate is not None else STATED_COPY
        self.measured_copy = table is not None and table.copy_rate is not None
        self._grid = LogGrid(table.attention) if table is not None and table.attention else None
        self._rates = [
            {size: _attention_flops(*size) * factor / times[i] for size, times in table.attention.items()}
            for i, factor in ((0, 1.0), (1, ATTENTION_BACKWARD))
            if table is not None
        ]

    def attention(self, sequence: int, heads: int, head_size: int, batch: int) -> tuple[float, float]:
        """Seconds of causal attention of ``batch`` sequences, forward and backward."""
        forward, backward = (
            batch * _attention_flops(sequence, heads, head_size) * f for f in (1.0, ATTENTION_BACKWARD)
        )
        if self._grid is None:
            return forward / (STATED_ATTENTION * FLOPS_RATE), backward / (STATED_ATTENTION * FLOPS_RATE)
        rates = [self._grid.rate((sequence, heads, head_size), series) for series in self._rates]
        return forward / rates[0], backward / rates[1]

    def memory(self, moved: float) -> float:
        """Seconds of element-wise kernels that read and write ``moved`` bytes."""
        return moved / (self._copy * ELEMENTWISE)

    def assumptions(self, links: Links) -> tuple[str, ...]:
        """What stands behind these times."""
        stated = f"stated at {STATED_ATTENTION * FLOPS_RATE / 1e12:.0f} TFLOP/s"
        attention = "as torch's fused kernel was measured" if self.measured_attention else stated
        copy = "measured" if self.measured_copy else "stated"
        return (
            f"attention: causal, backward {ATTENTION_BACKWARD:g} × the forward's FLOPs, {attention}",
            f"norms, RoPE, SwiGLU, additions, embedding, loss, optimizer: bytes moved at {ELEMENTWISE:.0%} of a copy's"
            f" {self._copy / 1e12:.2f} TB/s ({copy})",
            f"links (stated), a GPU: {links.within / 1e9:g} GB/s within a node of {links.node_size},"
            f" {links.between / 1e9:g} GB/s between nodes",
        )


def _attention_flops(sequence: int, heads: int, head_size: int) -> float:
    """Of the forward of one sequence: two products, half of them masked."""
    return 2.0 * math.prod((sequence, sequence, heads, head_size))

"""Bytes that a probe takes on one rank beside what a training pass takes anyway, from shapes alone.

What ``snip plan`` shows and what a run is held against before it probes: DESIGN, rule 3. Plain Python, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDE_COPIES = 6
"""FP32 copies of one linear's largest operand while the reference records it, or of one parameter's own elements while
drift is evaluated (gradient, error, their sum, both updates, their moments). Kernels take less."""
_MOVED_COPIES = 3  # FP32, of a weight that policy hawq moves: it, the signs, their sum
_FLOAT32 = 4


@dataclass(frozen=True)
class LinearRows:
    """One linear of a rank: rows that its GEMMs have in a microbatch, its local weight [n, k]."""

    rows: int
    n: int
    k: int

    @property
    def elements(self) -> int:
        """Of the weight."""
        return self.n * self.k


@dataclass(frozen=True)
class ProbedShapes:
    """One rank's share of what a probe records.

    Attributes:
        linears: its own; experts one by one.
        tokens: of a microbatch in the residual stream. hidden: its features. boundaries: of its sub-blocks, recorded.
        parameters: elements of all parameters whose gradients are read. largest: of the largest one.
        shards: data parallel ranks that share out the optimizer's state.
        element: bytes of a weight or activation.
    """

    linears: Sequence[LinearRows]
    tokens: int
    hidden: int
    boundaries: int
    parameters: int
    largest: int
    shards: int = 1
    element: int = 2

    def samples(self, probe_tokens: int, microbatches: int) -> float:
        """Rows of X and G of every linear, of h and r of every boundary, kept until the update is measured."""
        of_linears = sum(min(probe_tokens, linear.rows) * (linear.n + linear.k) for linear in self.linears)
        of_stream = min(probe_tokens, self.tokens) * self.boundaries * 2 * self.hidden
        return float(self.element * microbatches * (of_linears + of_stream))

    @property
    def features(self) -> float:
        """Elements that the linears read and write in a microbatch."""
        return float(sum(linear.rows * (linear.n + linear.k) for linear in self.linears))

    @property
    def recording(self) -> float:
        """Temporaries of the statistics pass."""
        sizes = (max(linear.rows * max(linear.n, linear.k), linear.elements) for linear in self.linears)
        return float(_FLOAT32 * WIDE_COPIES * max(sizes, default=0))

    @property
    def gradient_copy(self) -> float:
        """Estimator ``measured``: the gradient of every element whose optimizer state this rank has."""
        return self.element * self.parameters / self.shards

    @property
    def evaluating(self) -> float:
        """Temporaries of the drift of one parameter, which a rank's range of the optimizer's state may hold whole."""
        return _FLOAT32 * WIDE_COPIES * min(float(self.largest), self.parameters / self.shards)

    @property
    def weight_copy(self) -> float:
        """Policy ``hawq``: the linears' weights, to be put back."""
        return float(self.element * sum(linear.elements for linear in self.linears))

    @property
    def moving(self) -> float:
        """Temporaries of a weight that is moved."""
        return float(_FLOAT32 * _MOVED_COPIES * max((linear.elements for linear in self.linears), default=0))

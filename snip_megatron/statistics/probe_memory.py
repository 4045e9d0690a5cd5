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
class ProbedShapes:
    """One rank's share of what a probe records.

    Attributes:
        linears: (n, k) of its own linears' local weights.
        tokens: rows that their GEMMs have in a microbatch.
        hidden: features of the residual stream.
        parameters: elements of all parameters whose gradients are read. largest: of the largest one.
        shards: data parallel ranks that share out the optimizer's state.
        element: bytes of a weight or activation.
    """

    linears: Sequence[tuple[int, int]]
    tokens: int
    hidden: int
    parameters: int
    largest: int
    shards: int = 1
    element: int = 2

    def samples(self, probe_tokens: int, microbatches: int) -> float:
        """Rows of X and G of every linear, of h and r of every boundary, kept until the update is measured."""
        rows = min(probe_tokens, self.tokens) * microbatches
        boundaries = len(self.linears) / 2  # of two sub-blocks with two linears each
        return self.element * rows * (sum(n + k for n, k in self.linears) + 2 * boundaries * self.hidden)

    @property
    def recording(self) -> float:
        """Temporaries of the statistics pass."""
        sizes = (max(self.tokens * k, self.tokens * n, n * k) for n, k in self.linears)
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
        return float(self.element * sum(n * k for n, k in self.linears))

    @property
    def moving(self) -> float:
        """Temporaries of a weight that is moved."""
        return float(_FLOAT32 * _MOVED_COPIES * max((n * k for n, k in self.linears), default=0))

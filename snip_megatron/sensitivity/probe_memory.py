"""Bytes that a probe needs on one rank beyond those of a training pass, from shapes alone.

``snip plan`` shows them, and a run checks them before it probes (how-it-works.md, rules of a run). Plain Python, no
torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

WIDE_COPIES = 6
"""FP32 copies of the largest operand that torch holds at a time while it records a linear. Kernels need less."""
OUTPUT_TOKENS = 512
"""Number of evenly spread tokens of a microbatch for which a recorder computes Y and E (``README.md``).

A microbatch with fewer tokens is used whole.
"""
_FLOAT32 = 4


@dataclass(frozen=True)
class LinearRows:
    """One linear of a rank: rows of its GEMMs in a microbatch, and the shape of the local weight [n, k]."""

    rows: int
    n: int
    k: int

    @property
    def elements(self) -> int:
        return self.n * self.k


@dataclass(frozen=True)
class ProbedShapes:
    """One rank's share of what a probe records: its linears, of which each expert is one, and residual boundaries."""

    linears: Sequence[LinearRows]
    tokens: int  # of the residual stream of a microbatch, tokens × hidden
    hidden: int
    boundaries: int
    element: int = 2  # bytes of a weight or activation

    def samples(self, probe_tokens: int, microbatches: int) -> float:
        """Return the bytes of the sampled rows: X and G of linears, h and r of boundaries."""
        of_linears = sum(min(probe_tokens, linear.rows) * (linear.n + linear.k) for linear in self.linears)
        of_stream = min(probe_tokens, self.tokens) * self.boundaries * 2 * self.hidden
        return float(self.element * microbatches * (of_linears + of_stream))

    @property
    def features(self) -> float:
        """Elements that the linears read and write in a microbatch."""
        return float(sum(linear.rows * (linear.n + linear.k) for linear in self.linears))

    @property
    def recording(self) -> float:
        """Bytes of temporaries in the statistics pass."""
        sizes = (max(linear.rows * max(linear.n, linear.k), linear.elements) for linear in self.linears)
        return float(_FLOAT32 * WIDE_COPIES * max(sizes, default=0))

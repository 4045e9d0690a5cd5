"""Exposed seconds of a linear's exchanges over tensor parallel ranks (``layers/README.md``, gathers and sums).

With ``--snip-communication gather`` or ``all`` the exchanges of a linear depend on the formats of its GEMMs. Each is
charged to the GEMM whose format decides its bytes: the gather of X and the sum of Y to fprop, the kernels of the sum of
∂L/∂X to dgrad. The gather of G depends on two formats. It is quantised only if dgrad and wgrad both are, and if their
two operands have fewer bytes than bf16, so that each of them is charged a half of the gather's time with both in its
own format. The sum is exact if both have one format, and otherwise errs by at most half of the difference between
gathering in bf16 and in the smaller of the two.
"""

from __future__ import annotations

from snip_megatron.planner.layout import Layout
from snip_megatron.planner.memory import packed_bytes
from snip_megatron.planner.rates import Links, Rates
from snip_megatron.precision import Format, Gemm, LinearRow, Side


class Exchanges:
    """Predicts the exchanges of linears, in seconds of one microbatch.

    A linear exchanges the matrix whose features are not split: X and ∂L/∂X where ranks share its output, Y and G where
    they share its input. What overlaps with GEMMs is not counted: in the backward the gathers for weight gradients and
    the sums of ∂L/∂X, except for the kernels that quantise and add. Linears of experts exchange nothing here: the
    dispatcher does.
    """

    def __init__(self, layout: Layout, rates: Rates, links: Links) -> None:
        self._layout, self._rates = layout, rates
        self._rate = links.of(layout.tp)
        self._packs, self._reduces = layout.communication != "bf16", layout.communication == "all"

    def fixed(self, row: LinearRow) -> float:
        """Return the exposed seconds of a linear that no format decides."""
        sent, forwards = self._send(self._exchanged(row), 2.0), self._layout.shapes[row.name].forwards
        column = row.sharded is Side.OUTPUT
        if not self._layout.sequence_parallel:  # an all-reduce of Y
            return 0.0 if column else 2 * forwards * sent
        gathered = 0.0 if self._packs else (forwards if column else 1) * sent  # X, or G
        return gathered + (0.0 if column or self._reduces else forwards * sent)

    def charge(self, row: LinearRow, gemm: Gemm, fmt: Format) -> float:
        """Return the exposed seconds that the format of one GEMM decides."""
        if not self._packs:
            return 0.0
        elements, forwards = self._exchanged(row), self._layout.shapes[row.name].forwards
        column = row.sharded is Side.OUTPUT
        if gemm is Gemm.FPROP:
            if column:
                return forwards * self._send(elements, packed_bytes(fmt))
            sent = packed_bytes(fmt if fmt is Format.BF16 else Format.FP8)  # partial results of the GEMM
            summed = self._sum_kernels(elements, fmt) + self._send(elements, sent)
            return forwards * summed if self._reduces else 0.0
        if column:
            return self._sum_kernels(elements, fmt) if gemm is Gemm.DGRAD else 0.0
        each = packed_bytes(fmt)
        return self._send(elements, each if 2 * each < 2.0 else 2.0) / 2

    # -- single exchanges ----------------------------------------------------------------------------------------
    def _exchanged(self, row: LinearRow) -> float:
        """Return the elements of the matrix that ranks exchange: tokens × the features that are not split."""
        if self._layout.tp == 1 or row.experts > 1 or row.sharded is Side.NEITHER:
            return 0.0
        shape = self._layout.shapes[row.name]
        return float(shape.tokens * (shape.k if row.sharded is Side.OUTPUT else shape.n))

    def _sum_kernels(self, elements: float, fmt: Format) -> float:
        """Return the seconds of the kernels that quantise partial results of a GEMM and add them; 0 in bf16."""
        if not self._reduces or fmt is Format.BF16:
            return 0.0
        return self._rates.memory(elements * (2.0 + 2 * packed_bytes(Format.FP8) + 4.0 / self._layout.tp))

    def _send(self, elements: float, width: float) -> float:
        """Return the seconds in which a rank sends its share of a matrix, of so many bytes an element."""
        return (self._layout.tp - 1) / self._layout.tp * elements * width / self._rate

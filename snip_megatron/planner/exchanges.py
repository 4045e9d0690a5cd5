"""Exposed seconds of a linear's exchanges over tensor parallel ranks (``layers/README.md``, gathers and sums).

With ``--snip-communication gather`` or ``all`` the exchanges of a linear depend on the formats of its GEMMs.
:meth:`Exchanges.seconds` knows all three formats and is exact. A Problem adds up single GEMMs, so
:meth:`Exchanges.charge` attributes every exchange to the GEMM whose format decides its bytes: the gather of X and the
sum of Y to fprop, the kernels of the sum of ∂L/∂X to dgrad.

The gather of G depends on two formats. It is quantised only if dgrad and wgrad both are, and if their two operands have
fewer bytes than bf16. dgrad and wgrad are charged their Shapley values, as for a quantisation that two GEMMs share
(``timing/cost_model.py``): each a half of the gather's time with both in its own format. The sum is exact if both have
one format, and if G is gathered in bf16 whatever the two of them are. Otherwise it errs by at most half of the
difference between gathering in bf16 and in the smaller of the two formats.
"""

from __future__ import annotations

from snip_megatron.planner.layout import Layout
from snip_megatron.planner.memory import packed_bytes
from snip_megatron.planner.rates import Links, Rates
from snip_megatron.precision import Format, Gemm, LinearRow, Side
from snip_megatron.timing.shapes import ALL_BF16, Formats


class Exchanges:
    """Predicts the exchanges of linears.

    A linear exchanges the matrix whose features are not split: X and ∂L/∂X where ranks share its output, Y and G where
    they share its input. What overlaps with GEMMs is not counted: in the backward the gathers for weight gradients and
    the sums of ∂L/∂X, except for the kernels that quantise and add. Linears of experts exchange nothing here: the
    dispatcher does. All seconds are those of one microbatch.

    Args:
        layout: the sizes.
        rates: the rate of memory.
        links: bandwidths.
    """

    def __init__(self, layout: Layout, rates: Rates, links: Links) -> None:
        self._layout, self._rates = layout, rates
        self._rate = links.of(layout.tp)
        self._packs, self._reduces = layout.communication != "bf16", layout.communication == "all"

    def seconds(self, row: LinearRow, formats: Formats) -> float:
        """Return the exposed seconds of a linear on one rank, in the formats of fprop, dgrad and wgrad."""
        fprop, dgrad, wgrad = formats
        elements, forwards = self._exchanged(row), self._layout.shapes[row.name].forwards
        column = row.sharded is Side.OUTPUT
        if not self._layout.sequence_parallel:  # an all-reduce of Y
            whole = self._sum(elements, Format.BF16) + self._gather(elements, Format.BF16)
            return 0.0 if column else forwards * whole
        if column:
            return forwards * self._gather(elements, fprop) + self._sum_kernels(elements, dgrad)
        return forwards * self._sum(elements, fprop) + self._gather_gradient(elements, dgrad, wgrad)

    def charge(self, row: LinearRow, gemm: Gemm, fmt: Format) -> float:
        """Return the part of :meth:`seconds` that one GEMM is charged. It is 0 if no format changes this part."""
        if not self._packs:
            return 0.0
        elements, forwards = self._exchanged(row), self._layout.shapes[row.name].forwards
        column = row.sharded is Side.OUTPUT
        if gemm is Gemm.FPROP:
            if column:
                return forwards * self._gather(elements, fmt)
            return forwards * self._sum(elements, fmt) if self._reduces else 0.0
        if column:
            return self._sum_kernels(elements, fmt) if gemm is Gemm.DGRAD else 0.0
        return self._gather_gradient(elements, fmt, fmt) / 2

    def priced(self, row: LinearRow, formats: Formats) -> float:
        """Return the part of :meth:`seconds` that formats decide, exactly. In bf16 it is the sum of the charges."""
        if not self._packs:
            return 0.0
        charged = sum(self.charge(row, gemm, Format.BF16) for gemm in Gemm)
        return charged + self.seconds(row, formats) - self.seconds(row, ALL_BF16)

    # -- single exchanges ----------------------------------------------------------------------------------------
    def _exchanged(self, row: LinearRow) -> float:
        """Return the elements that a rank sends of a linear's matrix: tokens × the features that are not split."""
        if self._layout.tp == 1 or row.experts > 1 or row.sharded is Side.NEITHER:
            return 0.0
        shape = self._layout.shapes[row.name]
        return float(shape.tokens * (shape.k if row.sharded is Side.OUTPUT else shape.n))

    def _gather(self, elements: float, fmt: Format) -> float:
        """Return the seconds of gathering a matrix in a format, elements and scales."""
        return self._send(elements, packed_bytes(fmt) if self._packs else 2.0)

    def _gather_gradient(self, elements: float, dgrad: Format, wgrad: Format) -> float:
        """Return the seconds of gathering G before dgrad can start. The operand of wgrad is gathered during dgrad."""
        quantised = Format.BF16 not in (dgrad, wgrad) and packed_bytes(dgrad) + packed_bytes(wgrad) < 2.0
        return self._gather(elements, dgrad if quantised else Format.BF16)

    def _sum(self, elements: float, fmt: Format) -> float:
        """Return the seconds of summing the partial results of a GEMM in a format."""
        if not self._reduces or fmt is Format.BF16:
            return self._send(elements, 2.0)
        return self._sum_kernels(elements, fmt) + self._send(elements, packed_bytes(Format.FP8))

    def _sum_kernels(self, elements: float, fmt: Format) -> float:
        """Return the seconds of the kernels that quantise partial results of a GEMM and add them; 0 in bf16."""
        if not self._reduces or fmt is Format.BF16:
            return 0.0
        sent = packed_bytes(Format.FP8)
        return self._rates.memory(elements * (2.0 + 2 * sent + 4.0 / self._layout.tp))

    def _send(self, elements: float, width: float) -> float:
        """Return the seconds in which a rank sends its share of a matrix, of so many bytes an element."""
        return (self._layout.tp - 1) / self._layout.tp * elements * width / self._rate

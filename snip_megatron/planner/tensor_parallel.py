"""Exposed seconds of a linear's exchanges over tensor parallel ranks (``layers/README.md``, gathers and sums).

With ``--snip-communication gather`` or ``all`` the exchanges of a linear depend on the formats of its GEMMs.
:meth:`TensorParallel.seconds` knows all three formats and is exact. A Problem adds up single GEMMs, so
:meth:`TensorParallel.charge` attributes every exchange to the GEMM whose format decides its bytes: the gather of X and
the sum of Y to fprop, the kernels of the sum of ∂L/∂X to dgrad.

The gather of G depends on two formats. It is quantised only if dgrad and wgrad both are, and if their two operands have
fewer bytes than bf16. dgrad and wgrad are charged their Shapley values, as for a quantisation that two GEMMs share
(``timing/cost_model.py``): each a half of the gather's time with both in its own format. The sum is exact if both have
one format, and if G is gathered in bf16 whatever the two of them are. Otherwise it errs by at most half of the
difference between gathering in bf16 and in the smaller of the two formats.
"""

from __future__ import annotations

from snip_megatron.planner.memory import packed_bytes
from snip_megatron.planner.rates import Links, Rates
from snip_megatron.precision import Format, Gemm
from snip_megatron.timing.shapes import ALL_BF16, COLUMN_PARALLEL, Formats, LinearShape


class TensorParallel:
    """Predicts the exchanges of linears.

    Every linear exchanges a matrix of hidden features: X and ∂L/∂X of a column parallel linear, Y and G of a row
    parallel one. What overlaps with GEMMs is not counted: in the backward the gathers for weight gradients and the sums
    of ∂L/∂X, except for the kernels that quantise and add. All seconds are those of one microbatch.

    Args:
        ranks: the tensor parallel size.
        rates: the rate of memory.
        links: bandwidths.
        communication: ``--snip-communication``: ``bf16``, ``gather`` or ``all``.
        sequence_parallel: whether sequence parallelism is on. Quantised communication needs it.
    """

    def __init__(
        self, ranks: int, rates: Rates, links: Links, *, communication: str = "bf16", sequence_parallel: bool = False
    ) -> None:
        self._ranks, self._rates, self._links = ranks, rates, links
        self._sequence_parallel = sequence_parallel
        self._packs, self._reduces = communication != "bf16", communication == "all"

    def seconds(self, kind: str, shape: LinearShape, formats: Formats) -> float:
        """Return the exposed seconds of a linear on one rank, in the formats of fprop, dgrad and wgrad."""
        if self._ranks == 1:
            return 0.0
        fprop, dgrad, wgrad = formats
        elements, column = _exchanged(kind, shape), kind in COLUMN_PARALLEL
        if not self._sequence_parallel:  # an all-reduce of Y
            whole = self._sum(elements, Format.BF16) + self._gather(elements, Format.BF16)
            return 0.0 if column else shape.forwards * whole
        if column:
            return shape.forwards * self._gather(elements, fprop) + self._sum_kernels(elements, dgrad)
        return shape.forwards * self._sum(elements, fprop) + self._gather_gradient(elements, dgrad, wgrad)

    def charge(self, kind: str, shape: LinearShape, gemm: Gemm, fmt: Format) -> float:
        """Return the part of :meth:`seconds` that one GEMM is charged. It is 0 if no format changes this part."""
        if self._ranks == 1 or not self._packs:
            return 0.0
        elements, column = _exchanged(kind, shape), kind in COLUMN_PARALLEL
        if gemm is Gemm.FPROP:
            if column:
                return shape.forwards * self._gather(elements, fmt)
            return shape.forwards * self._sum(elements, fmt) if self._reduces else 0.0
        if column:
            return self._sum_kernels(elements, fmt) if gemm is Gemm.DGRAD else 0.0
        return self._gather_gradient(elements, fmt, fmt) / 2

    def priced(self, kind: str, shape: LinearShape, formats: Formats) -> float:
        """Return the part of :meth:`seconds` that formats decide, exactly. In bf16 it is the sum of the charges."""
        charged = sum(self.charge(kind, shape, gemm, Format.BF16) for gemm in Gemm)
        return charged + self.seconds(kind, shape, formats) - self.seconds(kind, shape, ALL_BF16)

    def gathered_output(self, elements: float, forwards: int) -> float:
        """Return the seconds of gathering an output of so many elements in each forward, and summing its gradient."""
        return (forwards + 1) * self._send(elements, 2.0)

    # -- single exchanges ----------------------------------------------------------------------------------------
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
        quantised = elements * (2.0 + sent)
        added = elements * sent + elements / self._ranks * (2.0 + 2.0)
        return self._rates.memory(quantised + added)

    def _send(self, elements: float, width: float) -> float:
        """Return the seconds in which a rank sends its share of a matrix, of so many bytes an element."""
        return (self._ranks - 1) / self._ranks * elements * width / self._links.of(self._ranks)


def _exchanged(kind: str, shape: LinearShape) -> float:
    """Return the elements of the matrix that a linear exchanges: tokens × the features that are not split."""
    return float(shape.tokens * (shape.k if kind in COLUMN_PARALLEL else shape.n))

"""Exposed seconds of a linear's communication over tensor parallel ranks (``gemm/README.md``, gathers and sums)."""

from __future__ import annotations

from snip_megatron.planner.layout import Layout
from snip_megatron.planner.memory import packed_bytes, scale_bytes
from snip_megatron.planner.rates import Links, Rates
from snip_megatron.precision import Format
from snip_megatron.timing.shapes import COLUMN_PARALLEL, Formats


class TensorParallel:
    """Predicts the communication of linears.

    Every linear exchanges a matrix of hidden features: X and ∂L/∂X of a column parallel linear, Y and G of a row
    parallel one. What overlaps with GEMMs is not counted: in the backward the gathers for weight gradients and the sums
    of ∂L/∂X.

    Args:
        layout: the sizes.
        rates: the rates of memory and of measured collectives.
        links: bandwidths, for what was not measured.
    """

    def __init__(self, layout: Layout, rates: Rates, links: Links) -> None:
        self._layout, self._rates, self._links = layout, rates, links
        self._sent = (layout.tp - 1) / layout.tp * layout.tokens * layout.model.hidden
        self._packs, self._reduces = layout.communication != "bf16", layout.communication == "all"

    def seconds(self, kind: str, formats: Formats) -> float:
        """Return the exposed seconds of one linear in one microbatch."""
        layout = self._layout
        if layout.tp == 1:
            return 0.0
        fprop, dgrad, wgrad = formats
        forwards = 2 if layout.recompute == "full" else 1
        column = kind in COLUMN_PARALLEL
        if not layout.sequence_parallel:  # an all-reduce of Y
            return 0.0 if column else forwards * (self._sum(Format.BF16) + self._gather(Format.BF16))
        if column:
            return forwards * self._gather(fprop)
        return forwards * self._sum(fprop) + self._gather_gradient(dgrad, wgrad)

    def _gather(self, fmt: Format) -> float:
        """Return the seconds of gathering a matrix in a format, elements and scales."""
        if not self._packs or fmt is Format.BF16:
            return self._collective("all_gather", "bf16", 2.0 * self._sent)
        return self._packed("all_gather", fmt)

    def _gather_gradient(self, dgrad: Format, wgrad: Format) -> float:
        """Return the seconds of gathering G before dgrad can start. The operand of wgrad is gathered during dgrad."""
        quantised = Format.BF16 not in (dgrad, wgrad) and packed_bytes(dgrad) + packed_bytes(wgrad) < 2.0
        return self._gather(dgrad if quantised else Format.BF16)

    def _sum(self, fmt: Format) -> float:
        """Return the seconds of summing the partial results of a GEMM in a format."""
        if not self._reduces or fmt is Format.BF16:
            return self._collective("reduce_scatter", "bf16", 2.0 * self._sent)
        layout = self._layout
        elements, sent = layout.tokens * layout.model.hidden, packed_bytes(Format.FP8)
        quantised = elements * (2.0 + sent)
        added = elements * sent + elements / layout.tp * (2.0 + 2.0)
        return self._rates.memory(quantised + added) + self._packed("all_to_all", Format.FP8)

    def _packed(self, collective: str, fmt: Format) -> float:
        scales = scale_bytes(fmt) * self._sent
        elements = self._collective(collective, "uint8", fmt.bits / 8 * self._sent)
        return elements + (self._collective(collective, "uint8", scales) if scales else 0.0)

    def _collective(self, collective: str, dtype: str, sent: float) -> float:
        ranks, measured = self._layout.tp, self._rates.collectives
        if measured is not None and ranks <= self._links.node_size:
            found = measured.seconds(collective, dtype, ranks, sent)
            if found is not None:
                return found
        return sent / self._links.of(ranks)

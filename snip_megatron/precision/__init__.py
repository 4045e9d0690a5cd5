"""Number formats, the GEMMs and linears that formats are chosen for, and the precision map that all ranks share."""

from snip_megatron.precision.formats import FOUR_BIT, VARIANTS, Format, Gemm, Variant, candidates_fault, misplaced
from snip_megatron.precision.linears import EXPERT_KINDS, LINEAR_KINDS, LinearId, option_id, split_option_id
from snip_megatron.precision.map import GRANULARITIES, STATUSES, PrecisionMap, fp4_fraction

__all__ = [
    "EXPERT_KINDS",
    "FOUR_BIT",
    "GRANULARITIES",
    "LINEAR_KINDS",
    "STATUSES",
    "VARIANTS",
    "Format",
    "Gemm",
    "LinearId",
    "PrecisionMap",
    "Variant",
    "candidates_fault",
    "fp4_fraction",
    "misplaced",
    "option_id",
    "split_option_id",
]

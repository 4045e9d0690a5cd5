"""Number formats, the GEMMs and linears that formats are chosen for, and the precision map that all ranks share."""

from snip_megatron.precision.formats import (
    ALL_BF16,
    FOUR_BIT,
    VARIANTS,
    Format,
    FormatPair,
    Formats,
    Gemm,
    Variant,
    candidates_fault,
    misplaced,
)
from snip_megatron.precision.linears import DENSE_LAYER, LinearId, LinearRow, Role, Side, option_id, split_option_id
from snip_megatron.precision.map import GRANULARITIES, STATUSES, PrecisionMap, format_shares, fp4_fraction

__all__ = [
    "ALL_BF16",
    "DENSE_LAYER",
    "FOUR_BIT",
    "GRANULARITIES",
    "STATUSES",
    "VARIANTS",
    "Format",
    "FormatPair",
    "Formats",
    "Gemm",
    "LinearId",
    "LinearRow",
    "PrecisionMap",
    "Role",
    "Side",
    "Variant",
    "candidates_fault",
    "format_shares",
    "fp4_fraction",
    "misplaced",
    "option_id",
    "split_option_id",
]

"""The only place that touches private or versioned names of Megatron; they are checked when this is imported."""

from snip_megatron.megatron.compat.defaults import check, set_defaults
from snip_megatron.megatron.compat.patches import apply
from snip_megatron.megatron.compat.versions import MEGATRON_VERSION, SUPPORTED, check_signature, check_version

__all__ = [
    "MEGATRON_VERSION",
    "SUPPORTED",
    "apply",
    "check",
    "check_signature",
    "check_version",
    "set_defaults",
]

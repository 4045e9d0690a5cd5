"""The configuration of a run. It imports neither torch nor Megatron, so that bad arguments are refused early."""

from snip_megatron.runtime.config.command_line import add_arguments, parse_snip_arguments
from snip_megatron.runtime.config.run import SnipConfig

__all__ = ["SnipConfig", "add_arguments", "parse_snip_arguments"]

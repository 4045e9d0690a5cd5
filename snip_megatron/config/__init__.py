"""The configuration of a run. It imports neither torch nor Megatron, so that bad arguments are refused early."""

from snip_megatron.config.command_line import add_arguments, parse_snip_arguments
from snip_megatron.config.run import SnipConfig
from snip_megatron.config.values import GuardSettings

__all__ = ["GuardSettings", "SnipConfig", "add_arguments", "parse_snip_arguments"]

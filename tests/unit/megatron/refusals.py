"""The line by which SNIP refuses Megatron's arguments."""

import argparse

from llama_arguments import linears
from refusal import refusal

from snip_megatron.config import SnipConfig
from snip_megatron.megatron import validate


def check(snip: SnipConfig, args: argparse.Namespace) -> None:
    """Check the arguments, and the model that they ask for."""
    validate.check(snip, args)
    validate.check_model(snip, args, linears(args))


def refused(snip: SnipConfig, args: argparse.Namespace) -> str:
    return refusal(check, snip, args)

"""The line by which SNIP refuses Megatron's arguments."""

import argparse

import pytest
from llama_arguments import linears

from snip_megatron.config import SnipConfig
from snip_megatron.errors import SnipError
from snip_megatron.megatron import validate


def check(snip: SnipConfig, args: argparse.Namespace) -> None:
    """Check the arguments, and the model that they ask for."""
    validate.check(snip, args)
    validate.check_model(snip, args, linears(args))


def refused(snip: SnipConfig, args: argparse.Namespace) -> str:
    with pytest.raises(SnipError) as caught:
        check(snip, args)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert "\n" not in message
    return message

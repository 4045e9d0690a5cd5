"""Reads SNIP's arguments from a command line that holds Megatron's as well."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from snip_megatron.config.run import SnipConfig, add_arguments
from snip_megatron.errors import SnipError


def parse_snip_arguments(argv: Sequence[str]) -> SnipConfig:
    """Parse SNIP's arguments alone, so that errors in them are reported before torch and Megatron are imported."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    try:
        known, _ = add_arguments(parser).parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise SnipError(str(error)) from None
    return SnipConfig.from_args(known)

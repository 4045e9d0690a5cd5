"""SNIP's arguments on a command line that holds Megatron's as well."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.config.defaults import MULTIPLIED
from snip_megatron.runtime.config.options import add_options, add_settings, given_options
from snip_megatron.runtime.config.run import SnipConfig


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--snip`` and one ``--snip-*`` argument for each option of :class:`SnipConfig`, and return ``parser``."""
    parser.formatter_class = _Help
    group = parser.add_argument_group("SNIP", "choice of number formats during training")
    group.add_argument("--snip", action="store_true", help="choose the format of every GEMM while training")
    add_options(group, SnipConfig)
    add_settings(group)
    return parser


class _Help(argparse.HelpFormatter):
    """Shows a help text with a bare percent sign as it is. Megatron 0.19 has one, with which ``--help`` fails."""

    def _expand_help(self, action: argparse.Action) -> str:
        try:
            return super()._expand_help(action)
        except ValueError:
            return action.help or ""


def _known(argv: Sequence[str]) -> argparse.Namespace:
    """Parse SNIP's arguments among others. Raises SnipError if one is invalid."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--train-iters", "--train-samples"):  # whether training has an end
        parser.add_argument(name)
    try:
        known, others = add_arguments(parser).parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise SnipError(str(error)) from None
    fields = {f.name for f in dataclasses.fields(SnipConfig)}
    for word in others:  # Megatron's parser refuses those that it does not know either
        argument = word.partition("=")[0]
        name = argument.removeprefix("--snip-").replace("-", "_")
        if argument.startswith("--snip-") and name in fields:
            raise SnipError(f"{argument} is a setting: use --snip-settings {name}=VALUE")
    return known


def given_arguments(argv: Sequence[str]) -> dict[str, Any]:
    """Return the fields of the configuration that SNIP's arguments among ``argv`` set. Raises SnipError."""
    return given_options(_known(argv), SnipConfig)


def parse_snip_arguments(argv: Sequence[str]) -> SnipConfig:
    """Parse SNIP's arguments alone, so that errors in them are reported before torch and Megatron are imported.

    What the arguments leave open has the value of a machine that emulates formats, if that is valid. Raises SnipError
    if an argument is invalid.
    """
    known = _known(argv)
    faults: list[SnipError] = []
    for backend in (None, *MULTIPLIED):  # the card is not known before torch is imported
        try:
            return SnipConfig.from_args(known, backend)
        except SnipError as error:
            faults.append(error)
    raise faults[0]

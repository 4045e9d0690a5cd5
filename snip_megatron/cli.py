"""``snip``: a thin dispatcher. A command is a module with ``add_arguments(parser)`` and ``run(args) -> exit code``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from snip_megatron import __version__
from snip_megatron.errors import SnipError

COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("snip_megatron.doctor.command", "say what this machine can run, and what is missing for the rest"),
    "solve": ("snip_megatron.solver.command", "choose a format for every item of a problem file"),
    "prepare-data": (
        "snip_megatron.megatron.prepare_data",
        "turn local text into Megatron's .bin/.idx and a tokenizer",
    ),
    "plan": ("snip_megatron.planner.command", "memory, time and speedup of a configuration before it is launched"),
    "launch": ("snip_megatron.launch.command", "train a known configuration with torchrun, on one node or several"),
    "calibrate": ("snip_megatron.calibration.command", "measure how long GEMMs take on this GPU, for time budgets"),
    "compare": ("snip_megatron.evaluation.command", "train the policies of experiment files and compare their losses"),
    "validate-proxy": ("snip_megatron.evaluation.proxy_command", "estimators against measured truth; age of scores"),
    "report": ("snip_megatron.reporting.command", "write the HTML report of a run directory"),
    "export": ("snip_megatron.export.command", "write a map for other tools, such as Megatron's own precision file"),
}


class _Parser(argparse.ArgumentParser):
    """One line for a mistake, as for every other bad input; the usage is in ``--help``."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    top = _Parser(prog="snip", description="SNIP for Megatron: choose which GEMM runs in FP4, FP8 or BF16.")
    top.add_argument("--version", action="version", version=f"snip {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, (module, help_line) in COMMANDS.items():
        sub = commands.add_parser(name, help=help_line, description=help_line)
        if arguments[:1] == [name]:  # only the command at hand is imported
            importlib.import_module(module).add_arguments(sub)
    args = top.parse_args(arguments)
    try:
        return int(importlib.import_module(COMMANDS[args.command][0]).run(args))
    except SnipError as error:
        print(f"snip {args.command}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of standard output is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())

"""``snip``: runs one of its commands. A command is a module with ``add_arguments(parser)`` and ``run(args)``.

``run`` returns the exit code. Only the module of the command that runs is imported.
"""

import argparse
import importlib
import io
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from snip_megatron import __version__
from snip_megatron.precision.errors import SnipError, cut, quoted, with_suggestion

COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("snip_megatron.tools.doctor", "report what this machine can run, and what is missing for the rest"),
    "solve": ("snip_megatron.tools.solve", "choose formats for another budget, from a run or a problem file"),
    "prepare-data": (
        "snip_megatron.megatron.prepare_data",
        "turn text into Megatron's .bin/.idx and a tokenizer",
    ),
    "plan": ("snip_megatron.tools.plan", "predict memory, time and speedup of a configuration before it is launched"),
    "trial": ("snip_megatron.tools.trial", "train a job for 60 steps in bf16, in Megatron's FP8 and under --snip"),
    "launch": ("snip_megatron.tools.launch", "train a known configuration with torchrun, on one node or several"),
    "calibrate": ("snip_megatron.tools.calibrate", "measure how long GEMMs take on this GPU, for time budgets"),
    "report": ("snip_megatron.tools.report", "write the HTML report of a run directory"),
    "blame": ("snip_megatron.tools.blame", "print whether rounding or a bug is to blame for a step, and how to ask"),
    "export": ("snip_megatron.tools.export", "write a map in the format of another tool"),
}


class _Parser(argparse.ArgumentParser):
    """Reports wrong arguments in one line, without the usage, which ``--help`` prints."""

    def error(self, message: str) -> NoReturn:
        choices = [name for action in self._actions for name in action.choices or ()]
        message = with_suggestion(message, [*self._option_string_actions, *choices])
        words = " ".join(map(cut, message.split(" ")))  # argparse quotes arguments of any length
        self.exit(2, f"{self.prog}: {words} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # encodings such as Latin-1 lack signs of the tables
        sys.stdout.reconfigure(errors="replace")
    top = _Parser(prog="snip", description="SNIP for Megatron: choose which GEMM runs in FP4, FP8 or BF16.")
    top.add_argument("--version", action="version", version=f"snip {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    subparsers = {n: commands.add_parser(n, help=text, description=text) for n, (_, text) in COMMANDS.items()}
    try:
        if arguments[:1] and arguments[0] in COMMANDS:
            importlib.import_module(COMMANDS[arguments[0]][0]).add_arguments(subparsers[arguments[0]])
        args, unknown = top.parse_known_args(arguments)
        if unknown:  # argparse itself would refer to snip --help, which lacks the arguments of the command
            subparsers[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
        code = int(importlib.import_module(COMMANDS[args.command][0]).run(args))
        print(end="", flush=True)  # a failed write raises here, not when the interpreter ends
        return code
    except SnipError as error:
        print(f"snip {arguments[0]}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of standard output has exited
        # The interpreter would otherwise fail to write the rest at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def positive(description: str, below: float = math.inf, above: float = 0.0) -> Callable[[str], float]:
    """Return an argument type for numbers between ``above`` and ``below``. Its errors contain the ``description``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not above < value < below:
            raise argparse.ArgumentTypeError(f"{quoted(text)} is not {description}")
        return value

    return parse


if __name__ == "__main__":
    sys.exit(main())

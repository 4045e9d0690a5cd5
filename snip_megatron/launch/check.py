"""Checks all arguments of a job in one process, before any rank is started.

``python -m snip_megatron.launch.check ARGUMENTS`` parses and validates Megatron's and SNIP's arguments as the last of
``WORLD_SIZE`` ranks would. It starts no process group and reads only the names of data files.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from snip_megatron.config import add_arguments, parse_snip_arguments
from snip_megatron.errors import SnipError

#: Begins the line of a refusal, among what libraries write to standard error.
_MARK = "snip-check: "
#: Begins a line that the command shows.
_NOTE = "snip-note: "


def check(arguments: Sequence[str], ranks: int, added: Mapping[str, str]) -> None:
    """Check the arguments of the training entry in a new process, since Megatron keeps global state.

    Args:
        arguments: the arguments.
        ranks: number of ranks of the job.
        added: environment variables of its ranks.

    Raises:
        SnipError: Megatron or SNIP refuses the arguments.
    """
    # Rank 0 would print a table of all arguments.
    rank = {"WORLD_SIZE": str(ranks), "RANK": str(ranks - 1), "LOCAL_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-m", __name__, *arguments],
        env={**os.environ, **added, **rank},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in done.stderr.splitlines():
        if line.startswith(_NOTE):
            print(line.removeprefix(_NOTE), flush=True)
    refusals = [line for line in done.stderr.splitlines() if line.startswith(_MARK)]
    if done.returncode and refusals:
        raise SnipError(refusals[0].removeprefix(_MARK))
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise SnipError(f"the check of the arguments failed with exit code {done.returncode} (see above)")


def _validate(argv: Sequence[str]) -> None:
    from snip_megatron.megatron.startup import prepare

    startup = prepare(argv, parse_snip_arguments(argv).no_compat)
    from snip_megatron.megatron import compat, validate
    from snip_megatron.megatron.attachment import configuration
    from snip_megatron.megatron.compat import pretraining
    from snip_megatron.megatron.compat.meta_model import CannotBuildError
    from snip_megatron.megatron.conversion import linears_on_meta
    from snip_megatron.megatron.data.datasets import check_data
    from snip_megatron.megatron.evaluation import check_evaluation

    def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.error = _refuse  # type: ignore[method-assign]
        compat.set_defaults(parser, startup)
        return add_arguments(parser)

    args = pretraining.parse_arguments(provide)
    compat.check(args, startup)
    check_data(args)
    config, _ = configuration(args)
    if config.enabled:
        validate.check(config, args)
        check_evaluation(config.eval, args)
    try:  # the configuration of the model checks its sizes
        model = pretraining.model_config(args, on_cpu=startup.on_cpu)
    except (AssertionError, ValueError) as error:
        raise SnipError(f"Megatron refuses the model: {error or type(error).__name__}") from error
    if config.enabled:
        compat.apply(args, startup)
        try:
            linears = linears_on_meta(args, model)
        except CannotBuildError as error:
            print(f"{_NOTE}{error}: maps and budgets are checked when training starts", file=sys.stderr, flush=True)
        else:
            validate.check_model(config, args, linears)


def _refuse(message: str) -> NoReturn:
    raise SnipError(message)


if __name__ == "__main__":
    try:
        _validate(sys.argv[1:])
    except SnipError as error:
        print(f"{_MARK}{error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)

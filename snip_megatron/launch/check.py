"""Checks all arguments of a job in one process, before any rank is started.

``python -m snip_megatron.launch.check ARGUMENTS`` parses and validates Megatron's and SNIP's arguments as rank 0 of
``WORLD_SIZE`` ranks would. It starts no process group and reads only the names of data files.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from snip_megatron.errors import SnipError
from snip_megatron.launch.job import Job

#: Begins the line of a refusal, among what libraries write to standard error.
_MARK = "snip-check: "


def check(job: Job, arguments: Sequence[str], added: Mapping[str, str]) -> None:
    """Check the arguments of a job in a new process, since Megatron keeps global state.

    Args:
        job: The job.
        arguments: Arguments of the training entry.
        added: Environment variables of its ranks.

    Raises:
        SnipError: If Megatron or SNIP refuses the arguments.
    """
    # Rank 0 would print a table of all arguments.
    world = str(job.layout.ranks)
    rank = {"WORLD_SIZE": world, "RANK": str(job.layout.ranks - 1), "LOCAL_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-m", __name__, *arguments],
        env={**os.environ, **added, **rank},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        refusals = [line for line in done.stderr.splitlines() if line.startswith(_MARK)]
        if not refusals:
            sys.stderr.write(done.stderr)
            raise SnipError(f"the check of the arguments failed with exit code {done.returncode} (see above)")
        raise SnipError(refusals[0].removeprefix(_MARK))


def main(argv: Sequence[str]) -> int:
    """Check ``argv``. Returns the exit code."""
    from snip_megatron.config import parse_snip_arguments

    try:
        config = parse_snip_arguments(list(argv))
        _validate(argv, config.no_compat)
    except SnipError as error:
        print(f"{_MARK}{error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def _validate(argv: Sequence[str], no_compat: Sequence[str]) -> None:
    from snip_megatron.megatron.startup import prepare

    startup = prepare(argv, no_compat)
    from snip_megatron.config import SnipConfig, add_arguments
    from snip_megatron.megatron import compat, validate
    from snip_megatron.megatron.compat import pretraining
    from snip_megatron.megatron.data.datasets import check_data
    from snip_megatron.megatron.evaluation import check_evaluation

    def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.error = _refuse  # type: ignore[method-assign]
        compat.set_defaults(parser, startup)
        return add_arguments(parser)

    args = pretraining.parse_arguments(provide)
    compat.check(args, startup)
    check_data(args)
    config = SnipConfig.from_args(args)
    if config.enabled:
        validate.check(config, args)
        check_evaluation(config.eval, args)
    try:  # the configuration of the model checks its sizes
        pretraining.model_config(args, on_cpu=startup.on_cpu)
    except (AssertionError, ValueError) as error:
        raise SnipError(f"Megatron refuses the model: {error or type(error).__name__}") from error


def _refuse(message: str) -> NoReturn:
    raise SnipError(message)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

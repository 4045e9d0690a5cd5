"""Adds SNIP to a Megatron training script with three lines.

    from snip_megatron.attach import attach, snip_arguments                               # 1
    args = parse_and_validate_args(extra_args_provider=snip_arguments(my_arguments))      # 2: adds --snip and --snip-*
    pretrain = attach(pretrain)                                                           # 3: before pretrain is called

Without ``--snip`` the script trains as before. Without a CUDA device, start the script with
``python -m snip_megatron.attach SCRIPT ARGUMENTS``, which redirects CUDA calls to the CPU (docs/own-script.md).
"""

import argparse
import functools
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

from snip_megatron.megatron import startup
from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.config import add_arguments, parse_snip_arguments

__all__ = ["attach", "snip_arguments"]

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def snip_arguments(provider: Provider | None = None) -> Provider:
    """Return an ``extra_args_provider`` for Megatron's parser that adds ``--snip`` and the ``--snip-*`` arguments.

    A wrong argument on the command line ends the script with one line instead of Megatron's usage. ``provider`` is the
    script's own ``extra_args_provider``, which is called first.
    """

    def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if provider is not None:
            parser = provider(parser)
        parser.error = _end  # type: ignore[method-assign]
        with _errors_end_script():
            current = startup.current(())
            if _is_active(parse_snip_arguments(sys.argv[1:]).snip, current):
                from snip_megatron.megatron import compat

                if current.on_cpu:
                    compat.set_defaults(parser, current)
                compat.let_snip_choose(parser)
            return add_arguments(parser)

    return provide


def attach[Pretrain: Callable[..., Any]](
    pretrain: Pretrain, *, on_adopt: Callable[[int, PrecisionMap], object] | None = None
) -> Pretrain:
    """Return Megatron's ``pretrain`` with SNIP around it, to be called with the same arguments.

    With ``--snip`` on the command line, the call checks the configuration, converts the linears of the model that the
    script's configuration or model provider builds, and wraps Megatron's training step. What SNIP refuses ends the
    script with one line and SNIP's exit code. Without ``--snip`` the script's own ``pretrain`` is called and nothing is
    changed. ``pretrain`` is ``megatron.training.pretrain``, before or after Megatron's in-process restart has wrapped
    it.

    Every rank calls ``on_adopt`` with the step and the map each time a map comes into force, before the first step
    under it. The first exception in it on a rank is printed in one line, and training goes on.
    """

    @functools.wraps(pretrain)
    def pretrain_under_snip(*args: Any, **kwargs: Any) -> Any:
        with _errors_end_script():
            arguments = parse_snip_arguments(sys.argv[1:])
            current = startup.current(arguments.snip_no_compat)
            if not _is_active(arguments.snip, current):
                return pretrain(*args, **kwargs)
            import torch

            if not current.on_cpu and not torch.cuda.is_available():
                raise SnipError(
                    "no CUDA device is visible: to run on the CPU, start python -m snip_megatron.attach SCRIPT ..."
                )
            from snip_megatron.megatron.attachment import run_attached

            return run_attached(pretrain, args, kwargs, current, on_adopt)

    return cast(Pretrain, pretrain_under_snip)


def _is_active(enabled: bool, current: startup.Startup) -> bool:
    """Return whether SNIP has an effect: under ``--snip``, and on the CPU, where Megatron needs compatibility sets.

    Raises SnipError if it has, and cannot work with this release of Megatron.
    """
    if enabled or current.on_cpu:
        with startup.names_checked():
            from snip_megatron.megatron import attachment  # noqa: F401 - imports all modules with Megatron's names
    return enabled or current.on_cpu


@contextmanager
def _errors_end_script() -> Iterator[None]:
    """Print a SnipError from inside this context in one line, and end the script with its exit code."""
    try:
        yield
    except SnipError as error:
        startup.report(error, Path(sys.argv[0]).stem)
        sys.exit(error.exit_code)


def _end(message: str) -> NoReturn:
    with _errors_end_script():
        raise SnipError(message)
    raise AssertionError


def main() -> int:
    """Run a script without a CUDA device. Returns the exit code."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print("usage: python -m snip_megatron.attach SCRIPT [ARGUMENTS ...]", file=sys.stderr)
        return 2
    sys.argv = sys.argv[1:]
    script = Path(sys.argv[0])
    with _errors_end_script():
        if not script.is_file():
            raise SnipError(f"{script}: no such file; give the path of the training script")
        startup.prepare(sys.argv[1:], parse_snip_arguments(sys.argv[1:]).snip_no_compat)
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())

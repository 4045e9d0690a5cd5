"""Training entry: ``torchrun ... -m snip_megatron.pretrain_gpt`` takes Megatron's arguments and ``--snip-*``."""

import sys
from collections.abc import Callable

from snip_megatron.megatron.startup import names_checked, note_exit_code, prepare, report
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.agreement import Terms, of_launcher, together
from snip_megatron.runtime.config import parse_snip_arguments


def main() -> int:
    """Train. Returns the exit code. A SnipError is printed as one line."""
    try:
        together(_prepare, of_launcher(), "pretrain_gpt")()
    except SnipError as error:
        report(error, "pretrain_gpt")
        return error.exit_code
    except SystemExit as leaving:  # Megatron leaves so after a signal, and with codes of its own after faults
        note_exit_code(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))
        raise
    return 0


def _prepare() -> tuple[Callable[[], None], Terms]:
    startup = prepare(sys.argv[1:], parse_snip_arguments(sys.argv[1:]).snip_no_compat)
    with names_checked():
        from snip_megatron.megatron import entry

    return entry.prepare(startup)


if __name__ == "__main__":
    sys.exit(main())

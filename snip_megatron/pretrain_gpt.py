"""``torchrun ... -m snip_megatron.pretrain_gpt``: Megatron's arguments plus ``--snip-*``."""

from __future__ import annotations

import argparse
import os
import sys
import time

from snip_megatron.config import SnipConfig, add_arguments
from snip_megatron.errors import SnipError
from snip_megatron.megatron.startup import is_rank_zero, prepare

#: Seconds for rank 0 to print before the others leave: a launcher kills every rank as soon as one has failed.
_PATIENCE = 20.0


def main() -> int:
    """Train; returns the exit code. A SnipError is one line: on rank 0 before ranks communicate, else where it is."""
    try:
        config = parse_snip_arguments(sys.argv[1:])
        startup = prepare(sys.argv[1:], config.no_compat)
        from snip_megatron.megatron.entry import run

        run(startup)
    except SnipError as error:
        _report(error)
        return error.exit_code
    return 0


def _report(error: SnipError) -> None:
    """All ranks find the same fault in the arguments, so one of them says it; later faults may be of one rank only."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        print(f"pretrain_gpt: [rank {os.environ.get('RANK', '0')}] {error}", file=sys.stderr, flush=True)
    elif is_rank_zero():
        print(f"pretrain_gpt: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(_PATIENCE)


def parse_snip_arguments(argv: list[str]) -> SnipConfig:
    """Our arguments alone: wrong ones are reported before torch and Megatron are imported."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    try:
        known, _ = add_arguments(parser).parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise SnipError(str(error)) from None
    return SnipConfig.from_args(known)


if __name__ == "__main__":
    sys.exit(main())

"""One rank of a training that waits for its turn: ``python -m benchmarks.jobs.process FOLDER [arguments]``.

Most of the time of a start goes to imports. They happen here before the turn, side by side with those of other
trainings, and without using the GPU. The file ``FOLDER/ready.RANK`` says that the rank waits. A line on its standard
input starts its turn, and the end of the input ends it.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from benchmarks.jobs import kernels as job_kernels


def main() -> int:
    """Import, wait and train. Returns the exit code of the entry."""
    folder = Path(sys.argv.pop(1))
    from snip_megatron import pretrain_gpt
    from snip_megatron.megatron.startup import prepare
    from snip_megatron.precision.errors import SnipError

    try:
        args = pretrain_gpt.parse_snip_arguments(sys.argv[1:])
        prepare(sys.argv[1:], args.snip_no_compat)  # before Megatron is imported, as the entry does
    except SnipError as error:
        print(f"pretrain_gpt: {error}", file=sys.stderr)
        return error.exit_code
    modules = ("snip_megatron.megatron.entry", "snip_megatron.megatron.setup")
    for module in modules if args.snip else modules[:1]:
        importlib.import_module(module)
    job_kernels.record(folder)
    (folder / f"ready.{os.environ.get('RANK', '0')}").touch()
    if not sys.stdin.readline():
        return 1
    return pretrain_gpt.main()


if __name__ == "__main__":
    sys.exit(main())

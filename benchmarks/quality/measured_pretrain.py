"""Training entry of ``validate_proxy``: forces every option alone after each probe.

    torchrun … -m benchmarks.quality.measured_pretrain ARGUMENTS    # those of snip_megatron.pretrain_gpt

It writes ``truth/step_<N>.npz`` into the run directory.
"""

import sys

from snip_megatron.megatron.startup import prepare, report
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.config import parse_snip_arguments


def main() -> int:
    """Train. Returns the exit code. A SnipError is printed as one line."""
    try:
        startup = prepare(sys.argv[1:], parse_snip_arguments(sys.argv[1:]).snip_no_compat)
        from benchmarks.quality.oracle import after_each_probe, record
        from snip_megatron.megatron.entry import run

        with after_each_probe(record):
            run(startup)
    except SnipError as error:
        report(error, "measured_pretrain")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The training entry with context parallelism let through: ``-m benchmarks.multi_gpu_entry``.

SNIP refuses ``--context-parallel-size`` until it has been run; this is what runs it.
"""

from __future__ import annotations

import sys

from snip_megatron.megatron.startup import prepare
from snip_megatron.pretrain_gpt import main as train


def main() -> int:
    """As ``snip_megatron.pretrain_gpt``."""
    prepare(sys.argv[1:], [])
    from snip_megatron.megatron import validate

    validate.CONFLICTS = tuple(c for c in validate.CONFLICTS if c.attribute != "context_parallel_size")
    return train()


if __name__ == "__main__":
    sys.exit(main())

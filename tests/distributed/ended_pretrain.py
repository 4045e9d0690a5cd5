"""The training entry, which prints whether it has left process groups behind. Module of warm ranks."""

from __future__ import annotations

import sys

from snip_megatron.megatron.startup import prepare
from snip_megatron.pretrain_gpt import parse_snip_arguments


def main() -> None:
    config = parse_snip_arguments(sys.argv[1:])
    startup = prepare(sys.argv[1:], config.no_compat)
    import torch.distributed as dist

    from snip_megatron.megatron import entry

    entry.run(startup)
    print("process groups left:", dist.is_initialized())


if __name__ == "__main__":
    main()

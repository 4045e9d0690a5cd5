"""The training entry on ranks whose devices tell how much memory is free: ``TIGHT=<rank>,<bytes>,<bytes>,…``.

That rank has so much at its first probe, its second and so on, and all others have plenty. Module of warm ranks:
``python -m tight_pretrain``.
"""

from __future__ import annotations

import os
import sys

from snip_megatron.megatron.startup import prepare
from snip_megatron.pretrain_gpt import parse_snip_arguments


def main() -> None:
    config = parse_snip_arguments(sys.argv[1:])
    startup = prepare(sys.argv[1:], config.no_compat)
    import torch

    from snip_megatron.megatron import entry
    from snip_megatron.runtime.probing import memory as probe_memory

    rank, *free = (int(number) for number in os.environ["TIGHT"].split(","))

    def of_a_small_gpu(device: torch.device) -> tuple[float, float]:
        tight = torch.distributed.get_rank() == rank
        return (free.pop(0) if tight else 2.0**40, 2.0**24)

    probe_memory.device_memory = of_a_small_gpu
    entry.run(startup)


if __name__ == "__main__":
    main()

"""The training entry with a loss that is eight times too large in the steps of ``SPIKES=<first>,<beyond>`` (from 0).

Module of warm ranks and of torchrun: ``python -m spiking_pretrain``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from snip_megatron.megatron.startup import prepare
from snip_megatron.pretrain_gpt import parse_snip_arguments


def main() -> None:
    config = parse_snip_arguments(sys.argv[1:])
    startup = prepare(sys.argv[1:], config.no_compat)
    from megatron.training import get_args

    from snip_megatron.megatron import entry

    first, beyond = (int(step) for step in os.environ["SPIKES"].split(","))
    genuine = entry.loss_function

    def spiking(*args: Any) -> Any:
        loss, tokens, reported = genuine(*args)
        factor = 8.0 if first <= get_args().curr_iteration < beyond else 1.0
        return (
            loss * factor,
            tokens,
            {name: value * value.new_tensor([factor, 1.0]) for name, value in reported.items()},
        )

    entry.loss_function = spiking
    entry.run(startup)


if __name__ == "__main__":
    main()

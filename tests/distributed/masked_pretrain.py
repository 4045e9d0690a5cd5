"""The training entry with a loss mask that leaves out the first three quarters of every sequence, as of a prompt.

Module of warm ranks: ``python -m masked_pretrain``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from snip_megatron.megatron.startup import prepare
from snip_megatron.pretrain_gpt import parse_snip_arguments


def main() -> None:
    parse_snip_arguments(sys.argv[1:])
    startup = prepare(sys.argv[1:], ())
    from snip_megatron.megatron import entry

    genuine = entry.loss_function

    def masked(loss_mask: torch.Tensor, output: torch.Tensor) -> Any:
        counted = torch.arange(loss_mask.shape[1]) >= 3 * loss_mask.shape[1] // 4
        return genuine(loss_mask * counted, output)

    entry.loss_function = masked
    entry.run(startup)


if __name__ == "__main__":
    main()

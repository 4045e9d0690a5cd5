"""The training entry with weights drawn by name, and an expert's names and numbers those of the dense MLP in its place.

So a decoder of mixtures of one expert is the dense decoder, down to the random signs of the drift and of stochastic
rounding.
"""

from __future__ import annotations

import sys
import zlib
from typing import Any

import torch

from snip_megatron.megatron.startup import prepare
from snip_megatron.pretrain_gpt import parse_snip_arguments


def draw_by_name(chunk: torch.nn.Module) -> None:
    """Normal weights of every matrix; norms keep theirs."""
    with torch.no_grad():
        for name, parameter in chunk.named_parameters():
            if parameter.dim() > 1:
                seed = zlib.crc32(name.replace("mlp.experts.local_experts.0.", "mlp.").encode())
                drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
                parameter.copy_(0.02 * drawn)


def main() -> int:
    parse_snip_arguments(sys.argv[1:])
    startup = prepare(sys.argv[1:], ())
    from snip_megatron.layers.context import LinearHandle
    from snip_megatron.megatron import setup
    from snip_megatron.megatron.entry import run
    from snip_megatron.precision import DENSE_LAYER

    def dense_index(handle: Any) -> int:
        kinds = len(DENSE_LAYER)
        return int(handle.id.layer * kinds + DENSE_LAYER.index(handle.id.path.replace(".experts.", ".")))

    hook = setup.SnipRun.pre_wrap_hook

    def pre_wrap_hook(snip_run: Any, chunks: list[Any]) -> list[Any]:
        for chunk in chunks:
            draw_by_name(chunk)
        return hook(snip_run, chunks)

    LinearHandle.index = property(dense_index)  # type: ignore[assignment,method-assign]
    setup.SnipRun.pre_wrap_hook = pre_wrap_hook  # type: ignore[method-assign]
    run(startup)
    return 0


if __name__ == "__main__":
    sys.exit(main())

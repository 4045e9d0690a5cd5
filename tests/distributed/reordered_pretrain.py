"""The training entry, with another order of parameters than stock's local layer: ``python -m reordered_pretrain``."""

from __future__ import annotations

import sys
from typing import Any

from snip_megatron import pretrain_gpt


def main() -> int:
    from snip_megatron.megatron.startup import prepare

    config = pretrain_gpt.parse_snip_arguments(sys.argv[1:])
    prepare(sys.argv[1:], config.no_compat)
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from snip_megatron.megatron.layer_spec import SeparateNormLayer
    from snip_megatron.megatron.setup import SnipRun

    hook = SnipRun.pre_wrap_hook

    def reordered(self: SnipRun, chunks: list[Any]) -> list[Any]:
        for chunk in chunks:
            for module in chunk.modules():
                if type(module) is TransformerLayer:
                    module.__class__ = SeparateNormLayer
        return hook(self, chunks)

    SnipRun.pre_wrap_hook = reordered  # type: ignore[method-assign]
    return pretrain_gpt.main()


if __name__ == "__main__":
    sys.exit(main())

"""The training entry with a model whose parameters whose name holds a part of ``FROZEN`` (a,b,...) are not trained.

Module of warm ranks: ``python -m frozen_pretrain``.
"""

from __future__ import annotations

import os
from typing import Any

from snip_megatron import pretrain_gpt


def main() -> int:
    from snip_megatron.megatron import setup

    hook = setup.SnipRun.pre_wrap_hook

    def freeze(snip_run: Any, chunks: list[Any]) -> list[Any]:
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if any(part in name for part in os.environ["FROZEN"].split(",")):
                    parameter.requires_grad_(False)
        return hook(snip_run, chunks)

    setup.SnipRun.pre_wrap_hook = freeze  # type: ignore[method-assign]
    return pretrain_gpt.main()


if __name__ == "__main__":
    main()

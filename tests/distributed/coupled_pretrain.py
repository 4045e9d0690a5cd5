"""The training entry with Adam whose weight decay is part of the gradient (``decoupled_weight_decay=False``).

Module of warm ranks: ``python -m coupled_pretrain``.
"""

from __future__ import annotations

from typing import Any

from snip_megatron import pretrain_gpt


def main() -> int:
    from megatron.core.optimizer import OptimizerConfig

    check = OptimizerConfig.__post_init__

    def couple(config: Any) -> None:
        config.decoupled_weight_decay = False
        check(config)

    OptimizerConfig.__post_init__ = couple  # type: ignore[method-assign]
    return pretrain_gpt.main()


if __name__ == "__main__":
    main()

"""The product's entry with a learning rate that jumps at step JUMP: no schedule of Megatron's does."""

from __future__ import annotations

import os
import sys
from typing import Any

from snip_megatron.megatron.startup import prepare
from snip_megatron.pretrain_gpt import parse_snip_arguments

FACTOR = 100.0


def main() -> None:
    config = parse_snip_arguments(sys.argv[1:])
    startup = prepare(sys.argv[1:], config.no_compat)
    from snip_megatron.megatron import compat
    from snip_megatron.megatron.entry import run

    jump = int(os.environ["JUMP"])

    def wrap(train_step: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            if kwargs["iteration"] >= jump:  # the schedule writes the rate anew after every step
                for group in args[3].param_groups:
                    group["lr"] *= FACTOR
            return train_step(*args, **kwargs)

        return step

    compat.wrap_train_step(wrap)
    run(startup)


if __name__ == "__main__":
    main()

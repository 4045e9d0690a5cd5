"""The training entry, with a NaN in rank 1's part of a weight: ``python -m nan_weight_pretrain``.

It is set before step 1 (from 0), whose optimizer step and gather bring it to all ranks.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from snip_megatron.megatron.startup import prepare
from snip_megatron.pretrain_gpt import parse_snip_arguments


def main() -> None:
    config = parse_snip_arguments(sys.argv[1:])
    startup = prepare(sys.argv[1:], config.no_compat)
    from snip_megatron.megatron import compat
    from snip_megatron.megatron.entry import run
    from snip_megatron.megatron.setup import SnipRun

    around_step = SnipRun.around_step

    def around_step_with_nan(self: SnipRun, train_step: Any, call: Any) -> Any:
        if call.step == 1 and dist.get_rank() == 1:
            weights = [p for name, p in call.model[0].named_parameters() if name.endswith("linear_fc2.weight")]
            held = [found for p in weights if (found := compat.held_state(call.optimizer, p)) is not None]
            held[0].main[5] = torch.nan
        return around_step(self, train_step, call)

    SnipRun.around_step = around_step_with_nan  # type: ignore[method-assign]
    run(startup)


if __name__ == "__main__":
    main()

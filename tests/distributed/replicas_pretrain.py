"""The training entry, for parameters that all tensor parallel ranks hold: ``python -m replicas_pretrain``.

With ``OUT=<folder>`` each rank writes ``rank<k>.pt`` after every step: their gradients by name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from snip_megatron.megatron.startup import prepare
from snip_megatron.pretrain_gpt import parse_snip_arguments


def main() -> None:
    config = parse_snip_arguments(sys.argv[1:])
    startup = prepare(sys.argv[1:], config.no_compat)
    from snip_megatron.megatron.entry import run
    from snip_megatron.megatron.setup import SnipRun

    around_step = SnipRun.around_step

    def around_step_and_write(self: SnipRun, train_step: Any, call: Any) -> Any:
        result = around_step(self, train_step, call)
        parameters = call.model[0].named_parameters()
        found = {name: p.main_grad for name, p in parameters if not getattr(p, "tensor_model_parallel", False)}
        torch.save(found, Path(os.environ["OUT"]) / f"rank{dist.get_rank()}.pt")
        return result

    SnipRun.around_step = around_step_and_write  # type: ignore[method-assign]
    run(startup)


if __name__ == "__main__":
    main()

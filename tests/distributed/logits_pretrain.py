"""The training entry, which after every step writes what the model answers: ``LOGITS=<file>``.

fp32 logits of ``TOKENS`` [batch, sequence, padded vocabulary], whole, from the first rank of the last pipeline stage.
"""

import os
from typing import Any

import torch

from snip_megatron import pretrain_gpt

TOKENS = torch.arange(2 * 64).view(2, 64) * 37 % 200


def wrap(train_step: Any) -> Any:
    def step(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        logits = _logits(args[2], args[6])
        if logits is not None:
            torch.save(logits, os.environ["LOGITS"])
        return result

    return step


@torch.no_grad()
def _logits(model: list[Any], schedule: Any) -> torch.Tensor | None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from snip_megatron.megatron import compat

    positions = torch.arange(64).expand(2, 64)
    hidden = torch.ones(1, 1, 64, 64, dtype=torch.bool).triu(1)

    def forward_step(data_iterator: Any, chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        return chunk(TOKENS, positions, hidden), lambda output, non_loss_data: output.clone()

    for chunk in model:
        chunk.eval()
    count = parallel_state.get_pipeline_model_parallel_world_size()  # an interleaved schedule wants a whole group
    with compat.rerun_disabled():
        found = schedule(
            forward_step_func=forward_step,
            data_iterator=[None] * len(model) if len(model) > 1 else None,
            model=model,
            num_microbatches=count,
            seq_length=64,
            micro_batch_size=2,
            forward_only=True,
            collect_non_loss_data=True,
        )
    for chunk in model:
        chunk.train()
    if not found:
        return None
    whole = gather_from_tensor_model_parallel_region(found[0])
    first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_data_parallel_rank() == 0
    return whole.float() if first else None


def main() -> int:
    from snip_megatron.megatron import compat

    compat.wrap_train_step(wrap)
    return pretrain_gpt.main()

"""From a data iterator to this rank's batch: read once per tensor-parallel group, then broadcast."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import mpu
from megatron.training import get_args

_SHAPES = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "position_ids": torch.int64,
}

Batch = dict[str, torch.Tensor | None]


def get_batch(data_iterator: Any, *, training: bool, at_pipeline_end: bool) -> Batch:
    """This rank's microbatch: tokens, labels, position_ids int64 and loss_mask fp32, each [microbatch, sequence].

    ``data_iterator`` is read on tensor-parallel rank 0 only. Middle pipeline stages (``at_pipeline_end`` False) need
    nothing of it: every value is None. ``attention_mask`` is None unless the data set makes one (causal attention
    needs none). Under context parallelism the sequence dimension holds this rank's share.
    """
    args = get_args()
    names = [*_SHAPES, "attention_mask"]
    if not at_pipeline_end:
        return dict.fromkeys(names)
    batch: Batch = {}
    group, source = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_src_rank()
    reads = mpu.get_tensor_model_parallel_rank() == 0
    sample = next(data_iterator) if reads else {}
    micro_batch = args.micro_batch_size if training else getattr(args, "eval_micro_batch_size", args.micro_batch_size)
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        name: (dtype, (micro_batch, args.seq_length)) for name, dtype in _SHAPES.items()
    }
    if makes_attention_mask(args):
        shapes["attention_mask"] = (torch.bool, (micro_batch, 1, args.seq_length, args.seq_length))
    for name, (dtype, shape) in shapes.items():
        if reads:
            tensor = sample[name].cuda(non_blocking=True)
        else:
            tensor = torch.empty(shape, dtype=dtype, device="cuda")
        if mpu.get_tensor_model_parallel_world_size() > 1:
            torch.distributed.broadcast(tensor, source, group=group)
        batch[name] = tensor
    batch.setdefault("attention_mask", None)
    return _context_parallel_share(batch)


def makes_attention_mask(args: Any) -> bool:
    """Whether data sets make attention masks: only where documents reset them, else the causal mask is implied."""
    return bool(args.reset_attention_mask and args.create_attention_mask_in_dataloader)


def _context_parallel_share(batch: Batch) -> Batch:
    """Chunks ``rank`` and ``2·size − 1 − rank`` of 2·size: equal causal attention work for every rank."""
    size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    if size == 1:
        return batch
    share: Batch = {}
    for name, tensor in batch.items():
        if tensor is None:
            share[name] = None
            continue
        chunks = tensor.chunk(2 * size, dim=2 if name == "attention_mask" else 1)
        share[name] = torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), dim=2 if name == "attention_mask" else 1)
    return share

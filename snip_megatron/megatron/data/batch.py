"""Reads a microbatch once per tensor parallel group and broadcasts it to the ranks of the group."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from megatron.core import mpu

_SHAPES = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "position_ids": torch.int64,
}

Batch = dict[str, torch.Tensor | None]


def get_batch(args: argparse.Namespace, data_iterator: Any, *, training: bool, at_pipeline_end: bool) -> Batch:
    """Return this rank's microbatch.

    Args:
        args: Megatron's arguments.
        data_iterator: Read on tensor parallel rank 0 only.
        training: Whether the microbatch has the training size or the validation size.
        at_pipeline_end: Whether this is the first or last pipeline stage. Other stages need no batch.

    Returns:
        ``tokens``, ``labels`` and ``position_ids`` (int64) and ``loss_mask`` (fp32), each [microbatch, sequence], and
        ``attention_mask``, which is None unless the data set makes one. Under context parallelism the sequence
        dimension holds this rank's part. All values are None on middle pipeline stages.
    """
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
    """Whether data sets make attention masks. They do if documents reset the mask; otherwise it is causal."""
    return bool(args.reset_attention_mask and args.create_attention_mask_in_dataloader)


def _context_parallel_share(batch: Batch) -> Batch:
    """Return chunks ``rank`` and ``2·size − 1 − rank`` of 2·size, which gives all ranks equal attention work."""
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

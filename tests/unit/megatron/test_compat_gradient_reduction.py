"""The replaced function of Megatron is there while it is wanted, and no longer."""

from __future__ import annotations

import argparse

import megatron.core.distributed.param_and_grad_buffer as buffers
import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig

from snip_megatron.errors import SnipError
from snip_megatron.megatron.compat import check_reduced_models, reduce_gradients_in_fp8

NAMES = ("reduce_scatter_with_fp32_accumulation", "dist_reduce_scatter_func")


def test_megatrons_functions_come_back() -> None:
    before = [getattr(buffers, name) for name in NAMES]
    args = argparse.Namespace(ddp_reduce_scatter_with_fp32_accumulation=False)
    undo = reduce_gradients_in_fp8(args)
    assert args.ddp_reduce_scatter_with_fp32_accumulation
    assert getattr(buffers, NAMES[0]) is not before[0]
    buffers.dist_reduce_scatter_func = getattr(buffers, NAMES[0])  # as Megatron does when it wraps a model
    undo()
    assert [getattr(buffers, name) for name in NAMES] == before
    assert not args.ddp_reduce_scatter_with_fp32_accumulation


def test_a_model_that_reduces_otherwise_is_refused() -> None:
    """A script may wrap its model with a configuration of its own."""
    model = torch.nn.Linear(2, 2)
    for reduces in (False, True):
        model.ddp_config = DistributedDataParallelConfig(reduce_scatter_with_fp32_accumulation=reduces)
        if reduces:
            check_reduced_models([model])
            continue
        with pytest.raises(SnipError, match="wrapped without Megatron's --ddp-reduce-scatter-with-fp32-accumulation"):
            check_reduced_models([model])

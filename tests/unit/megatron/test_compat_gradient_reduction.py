"""Which models sum their gradients as SNIP replaces it."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig

from snip_megatron.megatron.compat import check_reduced_models
from snip_megatron.precision.errors import SnipError


def test_a_model_that_reduces_otherwise_is_refused() -> None:
    """A script may wrap its model with a configuration of its own."""
    model = torch.nn.Linear(2, 2)
    model.ddp_config = DistributedDataParallelConfig(reduce_scatter_with_fp32_accumulation=True)
    check_reduced_models([model])
    model.ddp_config.reduce_scatter_with_fp32_accumulation = False
    with pytest.raises(SnipError, match="wrapped without Megatron's --ddp-reduce-scatter-with-fp32-accumulation"):
        check_reduced_models([model])

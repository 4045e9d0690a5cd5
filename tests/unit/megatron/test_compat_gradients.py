"""Gradients that are summed as quantised parts, and models that do not reduce so."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig

from snip_megatron.megatron.compat import check_reduced_models
from snip_megatron.megatron.compat.gradients import as_rows
from snip_megatron.precision.errors import SnipError


def test_a_model_that_reduces_otherwise_is_refused() -> None:
    """A script may wrap its model with a configuration of its own."""
    model = torch.nn.Linear(2, 2)
    model.ddp_config = DistributedDataParallelConfig(reduce_scatter_with_fp32_accumulation=True)
    check_reduced_models([model])
    model.ddp_config.reduce_scatter_with_fp32_accumulation = False
    with pytest.raises(SnipError, match="wrapped without Megatron's --ddp-reduce-scatter-with-fp32-accumulation"):
        check_reduced_models([model])


@pytest.mark.parametrize("ranks", [2, 8, 72])
@pytest.mark.parametrize("each", [1, 128 * 3, 128 * 77 + 5, 2048 * 5, 128 * (2**16 + 1), 2**27 + 128, 2**30 + 5])
def test_kernels_can_be_launched_on_a_bucket_of_any_size(ranks: int, each: int) -> None:
    """Without --overlap-grad-reduce a bucket is the whole model. CUDA has 65535 programs along the second dimension,
    each of which quantises 128 rows.
    """
    parts = torch.empty(ranks, each, device="meta")
    rows = as_rows(parts)
    assert rows.shape[1] % 128 == 0
    assert len(rows) % ranks == 0
    assert len(rows) <= 65535 * 128
    padding = rows.numel() // ranks - each
    assert 0 <= padding < max(128, parts.numel() / 2**14)

"""In which shape kernels get a bucket of gradients.

tests/distributed/test_gradient_reduction.py has the bits of the sums.
"""

import pytest
import torch

from snip_megatron.megatron.compat.gradients import as_rows


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

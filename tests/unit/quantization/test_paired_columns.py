"""What the Triton quantisers remember about given column ids."""

from __future__ import annotations

import torch

from snip_megatron.quantization.kernels.arguments import _PAIRED, are_pairs


def test_given_ids_are_looked_at_again_when_they_change_and_forgotten_with_them() -> None:
    before = len(_PAIRED)
    ids, odd = torch.arange(8), torch.arange(1, 9)
    assert are_pairs(ids)
    assert not are_pairs(odd)
    assert len(_PAIRED) == before + 2
    ids[3] = 11
    assert not are_pairs(ids)
    ids[3] = 3
    assert are_pairs(ids)
    del ids, odd
    assert len(_PAIRED) == before

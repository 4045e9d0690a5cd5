"""What the Triton quantisers remember about given column ids."""

from __future__ import annotations

import torch

from snip_megatron.quantization.kernels.arguments import _PAIRED, are_pairs


def test_given_ids_are_looked_at_again_when_they_change_and_forgotten_with_them() -> None:
    before = len(_PAIRED)
    ids, odd = torch.arange(8), torch.arange(1, 9)
    assert are_pairs(ids, 0)
    assert not are_pairs(odd, 0)
    assert len(_PAIRED) == before + 2
    ids[3] = 11
    assert not are_pairs(ids, 0)
    ids[3] = 3
    assert are_pairs(ids, 0)
    del ids, odd
    assert len(_PAIRED) == before


def test_counted_ids_are_pairs_from_an_even_start() -> None:
    assert are_pairs(None, 4)
    assert not are_pairs(None, 5)

"""What the Triton quantisers remember about given column ids."""

from __future__ import annotations

import torch

from snip_megatron.quantization.kernels import quantize as triton_quantize
from snip_megatron.quantization.kernels.quantize import _paired


def test_given_ids_are_looked_at_again_when_they_change_and_forgotten_with_them() -> None:
    before = len(triton_quantize._PAIRED)
    ids, odd = torch.arange(8), torch.arange(1, 9)
    assert _paired(ids, 0)
    assert not _paired(odd, 0)
    assert len(triton_quantize._PAIRED) == before + 2
    ids[3] = 11
    assert not _paired(ids, 0)
    ids[3] = 3
    assert _paired(ids, 0)
    del ids, odd
    assert len(triton_quantize._PAIRED) == before


def test_counted_ids_are_pairs_from_an_even_start() -> None:
    assert _paired(None, 4)
    assert not _paired(None, 5)

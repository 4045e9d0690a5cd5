"""What captured graphs ask of the kernels: keys from memory, weights written in place unless they are current."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from snip_megatron.quantization import derive_seeds
from snip_megatron.quantization.device_keys import DeviceKeys, Identity, advance
from snip_megatron.quantization.packed import CachedOperands, Operand, Operands

from .interpreter import Quantizers

KEYS = torch.tensor([[11, -7], [2**31 - 1, -(2**31)]], dtype=torch.int32)


@pytest.fixture(scope="module")
def kernels(interpreter: ProcessPoolExecutor) -> Quantizers:
    return Quantizers(interpreter)


def matrix(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).bfloat16()


def same(found: Operand | None, expected: Operand | None) -> None:
    assert found is not None
    assert expected is not None
    assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(found.scale, expected.scale)


def test_the_kernel_of_keys_gives_the_reference_s_words(kernels: Quantizers) -> None:
    keys = DeviceKeys([Identity(5, 3, 2), Identity(2**48 + 9, 1, 0)], (1, 2), torch.device("cpu"))
    keys.start_step(2**63 + 17, 123_456)
    memory = keys._state, keys._counts, keys._identities, keys._words
    for place in (1, 0, 1):
        expected = tuple(tensor.clone() for tensor in memory)
        advance(*expected, place, (1, 2))
        found = kernels.call("advance", *(tensor.clone() for tensor in memory), place, (1, 2))
        for tensor, one, other in zip(memory, found[:4], expected, strict=True):
            assert torch.equal(one, other)
            tensor.copy_(other)
    assert keys._counts.tolist() == [1, 2]
    assert keys._words.any()


def test_tiles_with_keys_from_memory(kernels: Quantizers) -> None:
    """Equal to those whose seeds are arguments."""
    formats = ("fp4", "fp4")
    x, cols = matrix(128, 192), torch.arange(192) * 2
    seeds = derive_seeds((1, 2, 3, 4), (1, 2))
    keys = DeviceKeys([Identity(4, 1, 3)], (1, 2), torch.device("cpu"))
    keys.start_step(1, 2)
    words = [key.clone() for key in keys.next(0)]
    expected = kernels.call("quantize_tiles", x, *formats, row_seed=seeds[0], col_seed=seeds[1], cols=cols)
    found = kernels.call("quantize_tiles", x, *formats, row_seed=words[0], col_seed=words[1], cols=cols)
    same(found.row, expected.row)
    same(found.col, expected.col)
    other = kernels.call("quantize_tiles", x, *formats, row_seed=KEYS[0], col_seed=KEYS[1], cols=cols)
    assert not torch.equal(*(each.row.values.view(torch.uint8) for each in (other, expected)))


@pytest.mark.parametrize("call", ["blocks", "tensor", "one side"])
def test_a_kept_weight(kernels: Quantizers, call: str) -> None:
    """Written anew where it is not current; untouched, whatever the weight, where it is."""
    from snip_megatron.quantization import packed

    def quantised(quantizers: Any, w: torch.Tensor, **held: Any) -> Operands:
        ask = (
            quantizers.call
            if isinstance(quantizers, Quantizers)
            else lambda name, *a, **k: getattr(packed, name)(*a, **k)
        )
        if call == "tensor":
            return ask("quantize_tensor", w, row=True, col=True, **held)
        return ask("quantize_blocks", w, "fp8", "fp4" if call == "blocks" else None, **held)

    first, second = matrix(160, 128), matrix(160, 128, seed=1)
    for quantizers in (kernels, packed):
        for current in (0, 1):
            flag = torch.tensor([current], dtype=torch.int32)
            held = CachedOperands(quantised(quantizers, first), flag)
            found = quantised(quantizers, second, held=held)
            expected = quantised(quantizers, first if current else second)
            same(found.row, expected.row)
            if call == "tensor":  # both have one scale, of which the interpreter's process makes two
                found = replace(found, col=found.col._replace(scale=found.row.scale))
            if call != "one side":
                same(found.col, expected.col)

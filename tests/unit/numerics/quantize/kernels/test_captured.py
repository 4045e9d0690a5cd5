"""What captured graphs ask of the kernels: keys from memory, weights written in place unless they are current."""

from functools import partial
from typing import Any

import pytest
import torch

from snip_megatron.numerics.quantize import derive_seeds, operands
from snip_megatron.numerics.quantize.device_keys import DeviceKeys, LinearIdentity, advance
from snip_megatron.numerics.quantize.operands import CachedPair, OperandPair

from ..specs import matrix, spec
from .interpreter import Quantizers
from .test_quantize import assert_operands

KEYS = torch.tensor([[11, -7], [2**31 - 1, -(2**31)]], dtype=torch.int32)


def test_the_kernel_of_keys_gives_the_reference_s_words(quantizers: Quantizers) -> None:
    keys = DeviceKeys([LinearIdentity(5, 3, 2), LinearIdentity(2**48 + 9, 1, 0)], (1, 2), torch.device("cpu"))
    keys.start_step(2**63 + 17, 123_456)
    memory = keys._state, keys._counts, keys._identities, keys._words
    for place in (1, 0, 1):
        expected = tuple(tensor.clone() for tensor in memory)
        advance(*expected, place, (1, 2))
        found = quantizers.call("advance", *(tensor.clone() for tensor in memory), place, (1, 2))
        for tensor, one, other in zip(memory, found[:4], expected, strict=True):
            assert torch.equal(one, other)
            tensor.copy_(other)
    assert keys._counts.tolist() == [1, 2]
    assert keys._words.any()


def test_tiles_with_keys_from_memory(quantizers: Quantizers) -> None:
    """Equal to those whose seeds are arguments."""
    formats = ("fp4", "fp4")
    x, cols = matrix(128, 192), torch.arange(192) * 2
    seeds = derive_seeds((1, 2, 3, 4), (1, 2))
    keys = DeviceKeys([LinearIdentity(4, 1, 3)], (1, 2), torch.device("cpu"))
    keys.start_step(1, 2)
    words = [key.clone() for key in keys.next(0)]

    def tiles(keys: Any) -> OperandPair:
        how = spec(*formats, row_seed=keys[0], col_seed=keys[1], cols=cols)
        return quantizers.call("quantize_operands", x, how)  # type: ignore[no-any-return]

    expected = tiles(seeds)
    assert_operands(tiles(words), expected)
    assert not torch.equal(*(each[0].values.view(torch.uint8) for each in (tiles(KEYS), expected)))


@pytest.mark.parametrize("formats", [("fp8", "fp4"), ("fp8_tensor", "fp8_tensor"), ("fp8", None)])
def test_a_kept_weight(quantizers: Quantizers, formats: tuple[str, str | None]) -> None:
    """Written anew where it is not current; untouched, whatever the weight, where it is."""
    how = spec(*formats, weight=True)
    for quantize in (partial(quantizers.call, "quantize_operands"), operands.quantize_operands):
        first, second = (quantize(matrix(160, 128, seed), how) for seed in (0, 1))
        for current in (0, 1):
            flag = torch.tensor([current], dtype=torch.int32)
            made = quantize(matrix(160, 128), how)
            if formats[0] == "fp8_tensor":  # both have one scale, of which the interpreter's process makes two
                made = made[0], made[1]._replace(scale=made[0].scale)
            found = quantize(matrix(160, 128, seed=1), how, CachedPair(made, flag))
            if formats[0] == "fp8_tensor":
                found = found[0], found[1]._replace(scale=found[0].scale)
            assert_operands(found, first if current else second)

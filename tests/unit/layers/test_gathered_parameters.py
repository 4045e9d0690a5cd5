"""Which weights are gathered quantised, and how many bytes ranks send; tests/distributed has the gathers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from snip_megatron.layers.parameter_gather import BufferedParameter, ParameterGather
from snip_megatron.precision import Format
from snip_megatron.quantization.ranges import formats_to_gather

BF16, FP8, FP4, TENSOR = Format.BF16, Format.FP8, Format.FP4, Format.FP8_TENSOR


@pytest.mark.parametrize(
    ("fprop", "dgrad", "formats"),
    [
        (FP8, FP8, (FP8,)),
        (FP4, FP4, (FP4,)),
        (FP8, FP4, (FP8, FP4)),
        (FP4, TENSOR, (FP4, TENSOR)),
        (FP8, TENSOR, ()),  # as many bytes as bf16
        (FP8, BF16, ()),
        (BF16, FP4, ()),
        (Format.NVFP4, FP4, ()),
        (Format.MXFP8, Format.MXFP8, ()),
    ],
)
def test_formats(fprop: Format, dgrad: Format, formats: tuple[Format, ...]) -> None:
    assert formats_to_gather(fprop, dgrad) == formats


def gather(parameters: list[BufferedParameter], elements: int, ranks: int, rank: int = 0) -> ParameterGather:
    group = SimpleNamespace(rank=lambda: rank, size=lambda: ranks)
    return ParameterGather(torch.zeros(elements, dtype=torch.bfloat16), cast(Any, group), parameters)


def test_ranks_with_unlike_bytes_are_evened_out() -> None:
    """An embedding on the first of four ranks; two ranks cannot do better than to send what they hold."""
    embedding, linears = BufferedParameter(0, (64, 64)), BufferedParameter(4096, (96, 128), (FP8,))
    assert linears.stop == 4 * 4096
    stream = gather([embedding, linears], linears.stop, 4)._stream
    assert stream.sizes == [8192, 4096, 4096, 4096]
    assert stream._part == 5120
    moved = [size - stream._shared(rank, rank) for rank, size in enumerate(stream.sizes)]
    assert moved == [3072, 2048, 1024, 0]
    for other in range(4):
        assert sum(stream._shared(rank, other) for rank in range(4)) == 5120
    two = gather([embedding, BufferedParameter(4096, (32, 128), (FP8,))], 8192, 2)._stream
    assert (two.sizes, two._part) == ([8192, 4096], 8192)


def test_only_what_other_ranks_hold_is_forgotten() -> None:
    plain, weight = BufferedParameter(0, (64,)), BufferedParameter(64, (10, 20), (FP4,))
    one = gather([plain, weight], 288, 2, rank=1)  # with padding at the end
    one.forget_others()
    assert torch.equal(one._buffer.isnan().nonzero().flatten(), torch.arange(64, 144))

"""A Hopper backend whose calls C++ repeats gives what Python gives."""

from typing import Any

import pytest
import torch

from snip_megatron.numerics.products.backend import REPLAYED
from snip_megatron.numerics.products.check import decibel
from snip_megatron.numerics.products.selection import replay
from snip_megatron.numerics.quantize import swiglu
from snip_megatron.numerics.quantize.kernels.replay import CONSTANTS, compiled_extension
from snip_megatron.numerics.quantize.operands import GradientKeys, OperandSpec
from snip_megatron.precision import Format, Formats

from .products import hopper, operands

FP8, FP4, TENSOR, BF16, NVFP4 = Format.FP8, Format.FP4, Format.FP8_TENSOR, Format.BF16, Format.NVFP4
FORMATS = [(TENSOR, TENSOR, TENSOR), (FP4, FP4, FP8), (FP8, NVFP4, BF16)]


@pytest.fixture(scope="module")
def extension() -> Any:
    result = compiled_extension()
    result.configure(CONSTANTS, lambda _: 0)
    return result


@pytest.mark.parametrize("formats", FORMATS, ids=lambda formats: "-".join(formats))
def test_a_linear_gives_what_python_gives(extension: Any, formats: Formats) -> None:
    python, replayed = hopper(activations=swiglu), replay(hopper(activations=swiglu), extension)
    fprop, dgrad, wgrad = formats
    for seed in range(5):
        results = []
        for each in (python, replayed):
            x, w, g = (t.bfloat16() + seed for t in operands(128, 64, 128))
            out = torch.ones(64, 128)
            weight = each.quantize(w, OperandSpec(fprop, dgrad, weight=True))
            y, saved = each.forward(x, weight[0], OperandSpec(fprop, wgrad))
            assert saved is not None
            spec = OperandSpec(dgrad, wgrad, keys=GradientKeys(2**40 + seed, 2**41 + seed, torch.arange(64)))
            d, grad = each.backward(g, weight[1], saved, spec, out)
            assert grad is out
            results.append((y, d, out))
        for expected, actual in zip(*results, strict=True):
            assert decibel(expected.float(), actual) > 80
    assert set(REPLAYED) == {"quantize", "multiply", "swiglu", "forward", "backward"}


def test_swiglu_times_probabilities_gives_what_python_gives(extension: Any) -> None:
    """Two linears of experts call it so: the number of rows differs from call to call."""
    python, replayed = hopper(activations=swiglu), replay(hopper(activations=swiglu), extension)
    memory = [  # in one place: other calls are those whose tensors lie at other alignments, which vary on a CPU
        (torch.empty(rows, 512).bfloat16(), torch.empty(rows, 256).bfloat16(), torch.empty(rows)) for rows in (128, 256)
    ]
    for call in range(12):
        y, d, probs = (each.normal_(generator=torch.Generator().manual_seed(call)) for each in memory[call % 2])
        results = []
        for each in (python, replayed):
            outputs = each.swiglu(y, None, OperandSpec(FP8, BF16), probs)
            outputs += each.swiglu(y, d, OperandSpec(FP8, None), probs)
            results.append([t if isinstance(t, torch.Tensor) else t.dequantize() for t in outputs if t is not None])
        for expected, actual in zip(*results, strict=True):
            assert torch.equal(expected, actual)
    assert replayed.replayed["swiglu"].replays > 0

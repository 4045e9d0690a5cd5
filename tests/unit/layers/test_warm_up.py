"""Which formats are run before training, and that the warm-up leaves the model's own linear alone."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from snip_megatron.gemm.backend import GemmBackend
from snip_megatron.gemm.shards import QuantizedShard
from snip_megatron.layers.context import ALL_BF16, LinearHandle, StepContext
from snip_megatron.layers.device_step import DeviceStep
from snip_megatron.layers.warm_up import covering, warm_up_gemms, warm_up_linear
from snip_megatron.precision import Format, LinearId
from snip_megatron.quantization import wire

BF16, FP8, FP4, TENSOR = Format.BF16, Format.FP8, Format.FP4, Format.FP8_TENSOR


@pytest.mark.parametrize(
    "options",
    [
        ((FP8, FP4), (FP8, FP4), (FP8, FP4)),
        ((FP8, FP4, TENSOR), (FP8, FP4, TENSOR), (FP8, FP4, TENSOR)),
        ((BF16,), (FP8, FP4), (FP8, FP4)),
        ((FP8,), (FP4,), (BF16,)),
    ],
)
def test_every_pair_of_formats_is_there(options: tuple[tuple[Format, ...], ...]) -> None:
    found = covering((options[0], options[1], options[2]), alike=False)
    for first, second in itertools.combinations(range(3), 2):
        pairs = {(formats[first], formats[second]) for formats in found}
        assert pairs == set(itertools.product(options[first], options[second]))
    assert len(found) <= max(len(a) * len(b) for a, b in itertools.combinations(options, 2)) + 1


def test_linears_with_one_format_have_no_pairs() -> None:
    assert covering(((FP8, FP4),) * 3, alike=True) == [(FP8,) * 3, (FP4,) * 3]


def a_linear() -> LinearHandle:
    return LinearHandle(
        LinearId(1, "mlp.linear_fc1"), "column", 48, 32, 0, 0, 1, torch.arange(48), torch.arange(32),
        StepContext(seed=3), torch.nn.Linear(32, 48, bias=False),
    )  # fmt: skip


def test_what_graphs_read_of_the_linear_is_left_alone() -> None:
    handle = a_linear()
    device = DeviceStep([handle], [0], torch.device("cpu"))
    device.start_step(3, 7)
    assert handle.state.graphed is not None
    expected = [words.clone() for words in handle.state.graphed.next_keys()]
    device.start_step(3, 7)
    linear = warm_up_linear(handle, 16, whole_x=False, graphed=True)
    warm_up_gemms(linear, [(FP8, FP4, FP4)])
    assert linear.handle.state.graphed is not None
    assert linear.handle.state.graphed.weight._cached is not None  # it has read its own
    assert handle.state.graphed.weight._cached is None
    assert all(torch.equal(a, b) for a, b in zip(handle.state.graphed.next_keys(), expected, strict=True))


@pytest.mark.parametrize(
    ("parallel", "formats", "expected"),
    [
        ("column", (FP8, FP8, FP4), [((128, 32), FP8, 1), ((128, 32), FP4, 0)]),
        ("column", (BF16, FP8, FP8), [((128, 32), BF16, 1), ((128, 32), FP8, 0)]),
        ("row", (FP8, FP8, FP4), [((128, 48), FP8, 1), ((128, 48), FP4, 0)]),
        ("row", (FP4, FP4, BF16), []),
    ],
)
def test_shards_that_training_packs_are_packed_in_each_format(
    parallel: str, formats: tuple[Format, Format, Format], expected: list[tuple[tuple[int, int], Format, int]]
) -> None:
    """The kernels that pack and open them are compiled before the first step."""
    packed = []

    class Packing(GemmBackend):
        def pack(self, side: Any, format: Format, axis: int) -> QuantizedShard:
            packed.append((tuple(side.tensor.shape), format, axis))
            return super().pack(side, format, axis)

    handle = replace(a_linear(), parallel=parallel, tp_size=2)
    handle.context.packs, handle.context.backend = True, Packing()
    warm_up_gemms(warm_up_linear(handle, 256, whole_x=parallel == "column"), [formats])
    assert packed == expected


@pytest.mark.parametrize(
    ("parallel", "formats", "expected"),
    [
        ("column", (BF16, FP8, FP4), [(256, 32)]),  # ∂L/∂X
        ("column", (FP8, BF16, FP8), []),
        ("row", (FP4, BF16, BF16), [(256, 48)]),  # Y
        ("row", (BF16, FP8, FP8), []),
    ],
)
def test_partial_sums_that_training_quantises_are_quantised(
    parallel: str,
    formats: tuple[Format, Format, Format],
    expected: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With ``--snip-communication all``."""
    seen, original = [], wire.pack_partial

    def pack(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(tuple(x.shape))
        return original(x)

    monkeypatch.setattr(wire, "pack_partial", pack)
    handle = replace(a_linear(), parallel=parallel, tp_size=2)
    for reduces in (False, True):
        handle.context.reduces = reduces
        warm_up_gemms(warm_up_linear(handle, 256, whole_x=parallel == "column"), [formats])
        assert seen == (expected if reduces else [])


def test_the_linear_itself_is_left_alone() -> None:
    handle = a_linear()
    module = handle.module
    before = module.weight.detach().clone()
    linear = warm_up_linear(handle, 16, whole_x=True)
    warm_up_gemms(linear, [(FP8, FP4, FP8), ALL_BF16, (FP4, FP4, BF16)])
    assert linear.handle.state.backwards == 2  # of the formats that are Megatron's own linear none
    assert (handle.state.backwards, handle.formats, handle.state.weights._key) == (0, ALL_BF16, None)
    assert module.weight.grad is None
    assert torch.equal(module.weight, before)
    assert linear.x.shape == (16, 32)
    assert linear.g.shape == (16, 48)

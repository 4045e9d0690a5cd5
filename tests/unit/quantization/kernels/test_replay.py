"""Replay in C++, really compiled: what is repeated on other memory, and what memory that takes.

CUDA's driver is a library of C functions, so that launches compute on the host.
"""

from __future__ import annotations

import ctypes
import gc
import re
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from snip_megatron.quantization.kernels.replay import (
    Launch,
    Product,
    Recording,
    Replayed,
    recording,
    run_opaque,
)
from snip_megatron.quantization.rounding import key_words

from .replay_library import Library, Side, flat, same_key, scaled
from .test_compiles import CAPTURED_TILES, SIDES, assembled


# -- what is repeated ----------------------------------------------------------------------------------------------
def test_a_replay_gives_the_bits_of_the_function_on_other_memory(extension: Any, library: Library) -> None:
    function = scaled(library, 5)
    replayed = Replayed(extension, function, patience=0)
    for seed in range(4):
        x, side = same_key(3, 4, seed=seed), Side(same_key(2, 6, seed=seed + 9), None, "tile")
        found, expected = flat(replayed.call((), x, side, 7)), flat(function((), x, side, 7))
        assert len(found) == len(expected) == 6
        for ours, truth in zip(found, expected, strict=True):
            if isinstance(truth, Tensor):
                assert torch.equal(ours, truth)
                assert (ours.dtype, ours.stride()) == (truth.dtype, truth.stride())
            else:
                assert ours == truth
        assert found[0].untyped_storage().data_ptr() == found[3].untyped_storage().data_ptr()
        assert found[5].data_ptr() == x.data_ptr()
    assert (replayed.replays, replayed.kept) == (3, 1)


def test_results_can_be_used_by_autograd(extension: Any) -> None:
    replayed = Replayed(extension, lambda _, x: (torch.empty(x.shape).copy_(x), x.detach()[1:]), patience=0)
    for seed in range(3):
        made, view = replayed.call((), same_key(4, seed=seed))
        made.requires_grad_().mul(view.sum()).sum().backward()
        torch.testing.assert_close(made.grad, view.sum().expand(4))
    assert replayed.replays == 2


@pytest.mark.parametrize("seeds", [(5, 6), (2**63 + 17, 2**64 - 1), (0, 1)])
def test_seeds_of_a_call_reach_the_kernel_as_key_words(
    extension: Any, library: Library, seeds: tuple[int, int]
) -> None:
    kernel = library.kernel("words", ("*i64", "i64", "i32", "i32", "i32"))

    def function(seeds: Any, x: Tensor) -> Tensor:
        out = torch.zeros(5, dtype=torch.int64)
        noted = recording()
        if noted is not None:
            words = (*seeds[1].words, seeds[0].words[1])
            noted.launch(kernel, (1, 1), (out,), (-(2**40), *words))
        return out

    replayed = Replayed(extension, function, patience=0)
    replayed.call((1, 2), same_key(4, seed=0))
    (_, high), second = key_words(seeds[0]), key_words(seeds[1])
    words = [word - (word >> 31 << 32) for word in (*second, high)]
    assert replayed.call(seeds, same_key(4, seed=1)).tolist() == [128, -(2**40), *words]
    assert replayed.replays == 1


def test_an_opaque_function_is_called_with_the_memory_of_the_call(extension: Any) -> None:
    def double(pair: tuple[Tensor, str], out: Tensor) -> None:
        out.copy_(2 * pair[0])

    def function(_: Any, x: Tensor) -> Tensor:
        out = torch.empty(2, 2)
        run_opaque(double, (x[:2], "unused"), out)
        return out

    replayed = Replayed(extension, function, patience=0)
    for seed in range(3):
        x = same_key(4, 2, seed=seed)
        assert torch.equal(replayed.call((), x), 2 * x[:2])
    assert replayed.replays == 2


def test_an_error_of_a_called_function_and_of_a_launch_reach_the_caller(extension: Any, library: Library) -> None:
    def fails(x: Tensor) -> None:
        if x[0] < 0:
            raise ValueError("a negative number")

    replayed = Replayed(extension, lambda _, x: run_opaque(fails, x) or x, patience=0)
    for _ in range(2):
        replayed.call((), same_key(4, seed=0).abs_())
    with pytest.raises(ValueError, match="a negative number"):
        replayed.call((), same_key(4, seed=0).abs_().neg_())

    def launches(_: Any, x: Tensor) -> Tensor:
        noted = recording()
        if noted is not None:
            noted.launch(library.kernel("scale", ("*fp32",), shared=47), (1, 1), (x,), ())
        return x

    refused = Replayed(extension, launches, patience=0)
    refused.call((), same_key(4, seed=0))
    with pytest.raises(RuntimeError, match="cannot be launched: error 1"):
        refused.call((), same_key(4, seed=0))


def test_arguments_may_share_memory_if_it_is_clear_which_is_used(extension: Any) -> None:
    for function, repeated in ((lambda a, b: a.detach() - b.view(-1), 2), (lambda a, b: a[1:] - b[1:], 0)):
        replayed = Replayed(extension, lambda _, a, b, function=function: function(a, b), patience=0)
        for seed in range(3):
            x = same_key(256, seed=seed)
            pair = x[64 * seed : 64 * seed + 4], x[128:132]
            pair = pair[::-1] if seed else (x[192:196], x[128:132])
            assert torch.equal(replayed.call((), *pair), function(*pair))
        assert replayed.replays == repeated


def test_empty_views_and_empty_launches_are_repeated(extension: Any, library: Library) -> None:
    def function(_: Any, x: Tensor) -> Tensor:
        noted = recording()
        if noted is not None:
            noted.launch(library.kernel("scale", ("*fp32",), shared=47), (0, 1), (x[4:],), ())
        return x.detach()[4:]

    replayed = Replayed(extension, function, patience=0)
    for seed in range(3):
        x = same_key(4, seed=seed)
        found = replayed.call((), x)
        assert (found.shape, found.storage_offset()) == ((0,), x.storage_offset() + 4)
    assert replayed.replays == 2


def test_zeros_have_the_strides_of_python(extension: Any) -> None:
    replayed = Replayed(extension, lambda _, x: (torch.zeros_like(x), torch.zeros_like(x.t())), patience=0)
    for shape, stride in (((1, 4), (1, 1)), ((3, 4), (1, 3))):
        for _ in range(3):
            x = same_key(12, seed=0).as_strided(shape, stride)
            found, expected = replayed.call((), x), (torch.zeros_like(x), torch.zeros_like(x.t()))
            assert [each.stride() for each in found] == [each.stride() for each in expected]
            assert not any(each.any() for each in found)
    assert replayed.replays == 4


def test_a_detached_argument_is_no_part_of_the_caller_s_graph(extension: Any) -> None:
    replayed = Replayed(extension, lambda _, x: (x.detach(), x), patience=0)
    for seed in range(3):
        x = same_key(4, seed=seed).requires_grad_()
        with torch.no_grad():
            found, same = replayed.call((), x)
        assert same is x
        assert not found.requires_grad
        assert found._version == x._version
        found.mul_(2)  # autograd would otherwise miss that a saved x has changed
        assert found._version == x._version
    assert replayed.replays == 2


# -- products ------------------------------------------------------------------------------------------------------
MATMUL = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 14, ctypes.c_size_t, ctypes.c_void_p)
SET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t)


def _float(address: int) -> ctypes.c_float:
    return ctypes.c_float.from_address(address)


@pytest.fixture
def products() -> Callable[..., Product]:
    """Products of two numbers and their scales, whose addresses the operation holds."""
    scales: dict[int, int] = {}

    def matmul(*given: Any) -> int:
        _, _, alpha, a, _, b, _, beta, c, _, d, _, algorithm, workspace, size, _ = given
        if c != d or algorithm != 77 or bool(workspace) != (size == 8):
            return 3
        factor = _float(alpha).value * _float(scales[17]).value * _float(scales[18]).value
        _float(d).value = factor * _float(a).value * _float(b).value + _float(beta).value * _float(c).value
        return 0

    def set_attribute(operation: int, name: int, value: Any, size: int) -> int:
        scales[name] = value[0]
        return 0 if (operation, size) == (66, 8) else 4

    functions = MATMUL(matmul), SET(set_attribute)
    one, half = ctypes.c_float(1.0), ctypes.c_float(0.5)

    def make(noted: Recording, a: Tensor, b: Tensor, out: Tensor, workspace: Tensor) -> Product:
        addresses = [int(ctypes.cast(each, ctypes.c_void_p).value or 0) for each in functions]
        return Product(
            *addresses, 55, 66, (1, 2, 3), 77, (-1, ctypes.addressof(one)), (-1, ctypes.addressof(half)),
            noted.address(a), noted.address(b), noted.address(out), noted.address(workspace), 8, (17, 18),
            (noted.address(a[1:]), noted.address(b[1:])),
        )  # fmt: skip

    return make


def multiplied(products: Callable[..., Product]) -> Callable[..., Tensor]:
    def function(_: Any, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        workspace = torch.empty(8, dtype=torch.uint8)
        noted = recording()
        if noted is not None:
            noted.product(products(noted, a, b, out, workspace))
        return out

    return function


def test_products_get_their_matrices_scales_and_factors(extension: Any, products: Callable[..., Product]) -> None:
    replayed = Replayed(extension, multiplied(products), patience=0)
    replayed.call((), *(same_key(2, seed=s) for s in range(3)))
    for seed in range(3):
        a, b, out = (same_key(2, seed=seed + s) for s in range(3))
        expected = a[0] * a[1] * b[0] * b[1] + 0.5 * out[0]
        assert replayed.call((), a, b, out).data_ptr() == out.data_ptr()
        torch.testing.assert_close(out[0], expected)
    assert replayed.replays == 3


def test_threads_do_not_mix_their_products(extension: Any, products: Callable[..., Product]) -> None:
    replayed = Replayed(extension, multiplied(products), patience=0)
    replayed.call((), *(same_key(2, seed=s) for s in range(3)))

    def differences(thread: int) -> list[float]:
        found = []
        for seed in range(thread, thread + 200):
            a, b, out = (same_key(2, seed=seed + s) for s in range(3))
            expected = a[0] * a[1] * b[0] * b[1] + 0.5 * out[0]
            replayed.call((), a, b, out)
            found.append(abs(float(out[0] - expected)))
        return found

    with ThreadPoolExecutor(4) as pool:
        found = [each for thread in pool.map(differences, range(0, 4000, 1000)) for each in thread]
    assert max(found) < 1e-5
    assert replayed.replays == 800


# -- Triton's kernels ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "constants"), [("tile_kernel", CAPTURED_TILES), ("block_kernel", SIDES)])
def test_arguments_are_those_of_a_kernel_that_triton_compiled(name: str, constants: dict[str, object]) -> None:
    """A recorded launch has an address or a number for each parameter, and two more parameters are scratch memory."""
    compiled = assembled(name, constants, "blocks" if name == "block_kernel" else "tiles")
    kinds = list(compiled.src.signature.values())
    tensors = [torch.empty(4) for kind in kinds if kind.startswith("*")]
    noted = Recording(tensors)
    compiled.function = 1
    noted.launch(compiled, (2, 3), tensors, [7] * (len(kinds) - len(tensors)))
    recorded = noted.finished(None)
    assert recorded is not None
    (launch,) = (timed.step for timed in recorded.steps)
    assert isinstance(launch, Launch)
    parameters = re.findall(r"\.param \.(u\d+)", compiled.asm["ptx"].split(")")[0])
    assert parameters == ["u64"] * len(launch.addresses) + ["u32"] * len(launch.numbers) + ["u64"] * 2
    assert f".reqntid {launch.threads}" in compiled.asm["ptx"]


# -- memory --------------------------------------------------------------------------------------------------------
def test_neither_a_recording_nor_a_replay_keeps_memory(extension: Any) -> None:
    seen: list[weakref.ref[Any]] = []

    def keep(x: Tensor) -> None:
        seen.append(weakref.ref(x.untyped_storage()))
        seen.append(weakref.ref(x))

    def function(_: Any, x: Tensor) -> Tensor:
        first = torch.empty(8)
        run_opaque(keep, first)
        second = torch.empty(8)
        run_opaque(keep, second)
        return second

    replayed = Replayed(extension, function, patience=0)
    for _ in range(3):
        x = same_key(4, seed=0)
        result = replayed.call((), x)
        seen.append(weakref.ref(x))
        del x, result
    gc.collect()
    assert replayed.replays == 2
    assert not [each for each in seen if each() is not None]


def test_a_slot_is_freed_after_its_last_use() -> None:
    x = torch.ones(4)
    with Recording([x]) as noted:
        first = torch.empty(4)
        second = first + x
        third = torch.empty(4)
        result = second.mul_(third)
    recorded = noted.finished(result)
    assert recorded is not None
    assert [set(timed.last_uses) for timed in recorded.steps] == [set(), {0, 1}, set(), {3}]

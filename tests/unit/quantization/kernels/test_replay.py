"""Replay in C++, really compiled: what is repeated on other memory, what needs a recording of its own, what is refused.

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

from snip_megatron.precision import Format
from snip_megatron.quantization.kernels.listing import listed
from snip_megatron.quantization.kernels.replay import Recording, Replayed, Seed, recording, run_opaque
from snip_megatron.quantization.rounding import key_words

from .replay_library import Library, Side, flat, same_key, scaled
from .test_compiles import CAPTURED_TILES, SIDES, assembled


# -- what is repeated ----------------------------------------------------------------------------------------------
def test_a_replay_gives_what_the_function_gives_on_other_memory(extension: Any, library: Library) -> None:
    function = scaled(library, 5)
    replayed = Replayed(extension, function)
    for seed in range(5):
        x, side = same_key(3, 4, seed=seed), Side(same_key(2, 6, seed=seed + 9), None, "tile")
        result = replayed.call(x, side, 7)
        assert isinstance(result[0], Side)
        found, expected = flat(result), flat(function(x, side, 7))
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
    replayed = Replayed(extension, lambda x: (torch.empty(x.shape).copy_(x), x.detach()[1:]))
    for seed in range(4):
        made, view = replayed.call(same_key(4, seed=seed))
        made.requires_grad_().mul(view.sum()).sum().backward()
        torch.testing.assert_close(made.grad, view.sum().expand(4))
    assert replayed.replays == 2


@pytest.mark.parametrize("seeds", [(2**31, 2**31 + 6), (2**63 + 17, 2**64 - 1)])
def test_seeds_of_a_call_reach_the_kernel_as_key_words(
    extension: Any, library: Library, seeds: tuple[int, int]
) -> None:
    kernel = library.kernel("words", ("*i64", "i64", "i32", "i32", "i32"))

    def function(x: Tensor, first: Any, other: Any) -> Tensor:
        out = torch.zeros(5, dtype=torch.int64)
        noted = recording()
        if noted is not None:
            noted.launch(kernel, (1, 1), (out,), (-(2**40), *other[0].words, first.words[1]))
        return out

    replayed = Replayed(extension, function)
    for _ in range(2):
        replayed.call(same_key(4, seed=0), 2**40, (2**41,))
    (_, high), second = key_words(seeds[0]), key_words(seeds[1])
    words = [word - (word >> 31 << 32) for word in (*second, high)]
    assert replayed.call(same_key(4, seed=1), seeds[0], (seeds[1],)).tolist() == [128, -(2**40), *words]
    assert replayed.replays == 1


def test_an_opaque_function_is_called_with_the_memory_of_the_call(extension: Any) -> None:
    def double(pair: tuple[Tensor, str], out: Tensor) -> None:
        out.copy_(2 * pair[0])

    def function(x: Tensor) -> Tensor:
        out = torch.empty(2, 2)
        run_opaque(double, (x[:2], "unused"), out)
        return out

    replayed = Replayed(extension, function)
    for seed in range(4):
        x = same_key(4, 2, seed=seed)
        assert torch.equal(replayed.call(x), 2 * x[:2])
    assert replayed.replays == 2


def test_an_error_of_a_called_function_and_of_a_launch_reach_the_caller(extension: Any, library: Library) -> None:
    def fails(x: Tensor) -> None:
        if x[0] < 0:
            raise ValueError("a negative number")

    replayed = Replayed(extension, lambda x: run_opaque(fails, x) or x)
    for _ in range(3):
        replayed.call(same_key(4, seed=0).abs_())
    with pytest.raises(ValueError, match="a negative number"):
        replayed.call(same_key(4, seed=0).abs_().neg_())

    def launches(x: Tensor) -> Tensor:
        noted = recording()
        if noted is not None:
            noted.launch(library.kernel("scale", ("*fp32",), shared=47), (1, 1), (x,), ())
        return x

    refused = Replayed(extension, launches)
    for _ in range(2):
        refused.call(same_key(4, seed=0))
    with pytest.raises(RuntimeError, match="cuLaunchKernel failed with status 1"):
        refused.call(same_key(4, seed=0))


def test_arguments_may_share_memory_if_it_is_clear_which_is_used(extension: Any) -> None:
    for function, repeated in ((lambda a, b: a.detach() - b.view(-1), 2), (lambda a, b: a[1:] - b[1:], 0)):
        replayed = Replayed(extension, function)
        for seed in range(4):
            x = same_key(256, seed=seed)
            pair = x[64 * (seed % 2) : 64 * (seed % 2) + 4], x[128:132]
            pair = pair[::-1] if seed > 1 else (x[192:196], x[128:132])
            assert torch.equal(replayed.call(*pair), function(*pair))
        assert replayed.replays == repeated


def test_empty_views_and_empty_launches_are_repeated(extension: Any, library: Library) -> None:
    def function(x: Tensor) -> Tensor:
        noted = recording()
        if noted is not None:
            noted.launch(library.kernel("scale", ("*fp32",), shared=47), (0, 1), (x[4:],), ())
        return x.detach()[4:]

    replayed = Replayed(extension, function)
    for seed in range(4):
        x = same_key(4, seed=seed)
        found = replayed.call(x)
        assert (found.shape, found.storage_offset()) == ((0,), x.storage_offset() + 4)
    assert replayed.replays == 2


def test_a_detached_argument_is_no_part_of_the_caller_s_graph(extension: Any) -> None:
    replayed = Replayed(extension, lambda x: (x.detach(), x))
    for seed in range(4):
        x = same_key(4, seed=seed).requires_grad_()
        with torch.no_grad():
            found, same = replayed.call(x)
        assert same is x
        assert not found.requires_grad
        found.mul_(2)  # autograd would otherwise miss that a saved x has changed
        assert found._version == x._version
    assert replayed.replays == 2


# -- functions of libraries ----------------------------------------------------------------------------------------
MATMUL = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 14, ctypes.c_size_t, ctypes.c_void_p)
SET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t)


def _float(address: int) -> ctypes.c_float:
    return ctypes.c_float.from_address(address)


@pytest.fixture
def multiplied() -> Callable[..., Tensor]:
    """A product of two numbers and their scales, whose addresses an operation of the library holds."""
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

    def function(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        workspace = torch.empty(8, dtype=torch.uint8)
        noted = recording()
        if noted is not None:
            product, setting = (int(ctypes.cast(each, ctypes.c_void_p).value or 0) for each in functions)
            for name, scale in ((17, a[1:]), (18, b[1:])):
                noted.c_call("set", setting, 66, name, ("pointer", (noted.address(scale),)), 8)
            first, second, result = noted.address(a), noted.address(b), noted.address(out)
            factors = ctypes.addressof(one), ctypes.addressof(half)
            noted.c_call(
                "matmul", product, 55, 66, factors[0], first, 1, second, 2, factors[1], result, 3, result, 3, 77,
                noted.address(workspace), 8, ("stream",),
            )  # fmt: skip
        return out

    return function


def test_threads_do_not_mix_their_products(extension: Any, multiplied: Callable[..., Tensor]) -> None:
    replayed = Replayed(extension, multiplied)
    for _ in range(2):
        replayed.call(*(same_key(2, seed=s) for s in range(3)))

    def differences(thread: int) -> list[float]:
        found = []
        for seed in range(thread, thread + 200):
            a, b, out = (same_key(2, seed=seed + s) for s in range(3))
            expected = a[0] * a[1] * b[0] * b[1] + 0.5 * out[0]
            assert replayed.call(a, b, out).data_ptr() == out.data_ptr()
            found.append(abs(float(out[0] - expected)))
        return found

    with ThreadPoolExecutor(4) as pool:
        found = [each for thread in pool.map(differences, range(0, 4000, 1000)) for each in thread]
    assert max(found) < 1e-5
    assert replayed.replays == 800


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
    (((_, _, _, (_, *shape, _, (_, given), _)), _),) = recorded[1]
    parameters = re.findall(r"\.param \.(u\d+)", compiled.asm["ptx"].split(")")[0])
    assert parameters == ["u64" if isinstance(each, tuple) else "u32" for each in given[:-2]] + ["u64"] * 2
    assert f".reqntid {shape[3]}" in compiled.asm["ptx"]


# -- what needs a recording of its own -----------------------------------------------------------------------------
BASE = {"shape": (4, 4), "dtype": torch.float32, "stride": (4, 1), "offset": 0, "scale": None, "scaling": "tile",
        "number": 3, "format": Format.FP8}  # fmt: skip


def arguments(**changes: Any) -> tuple[Any, ...]:
    given = BASE | changes
    memory = same_key(256, seed=0).view(given["dtype"])
    x = memory.as_strided(given["shape"], given["stride"], memory.storage_offset() + given["offset"])
    scale = None if given["scale"] is None else same_key(*given["scale"], seed=1)
    return x, Side(same_key(2, seed=2), scale, given["scaling"]), given["number"], given["format"]


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (4, 3)}, {"dtype": torch.int32}, {"stride": (1, 4)}, {"offset": 4}, {"scale": (1,)},
        {"scaling": "block"}, {"number": 4}, {"number": -3}, {"format": Format.FP4}, {"format": None},
    ],
    ids=str,
)  # fmt: skip
def test_other_arguments_are_recorded_anew(extension: Any, changes: dict[str, Any]) -> None:
    calls = []
    replayed = Replayed(extension, lambda *given: (calls.append(given), given[0])[1])
    for given in (BASE, BASE, BASE, changes, changes, changes, BASE):
        replayed.call(*arguments(**given))
    assert len(calls) == 4
    assert (replayed.replays, replayed.kept) == (3, 2)


def test_calls_that_did_not_come_again_make_room(extension: Any) -> None:
    replayed = Replayed(extension, lambda x, number: x + number)
    x = same_key(4, seed=0)
    for number in range(4200):
        replayed.call(x, number)
    for _ in range(3):
        assert torch.equal(replayed.call(x, 5000), x + 5000)
    assert (replayed.replays, replayed.kept) == (1, 1)


def test_inference_mode_is_recorded_apart_and_autocast_and_listings_run_python(extension: Any) -> None:
    replayed = Replayed(extension, lambda x: x @ x)
    for _ in range(4):
        x = same_key(4, 4, seed=0)
        assert not replayed.call(x).is_inference()
        with torch.inference_mode():
            assert replayed.call(x).is_inference()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert replayed.call(x).dtype is torch.bfloat16
        with listed(run=True):
            replayed.call(x)
    assert (replayed.replays, replayed.kept) == (4, 2)


def test_a_mode_of_torch_sees_every_function(extension: Any) -> None:
    replayed = Replayed(extension, lambda x: x + 1)
    x = same_key(4, seed=0)
    for _ in range(3):
        replayed.call(x)
    outer = Recording([x])
    with outer:
        found = replayed.call(x)
    recorded = outer.finished(found)
    assert replayed.replays == 1
    assert recorded is not None
    assert len(recorded[1]) == 1


# -- what is refused -----------------------------------------------------------------------------------------------
OUTSIDE = torch.ones(4)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * float(x.sum()),
        lambda x: x + OUTSIDE,
        lambda x: x.as_strided((2,), (1,), x.storage_offset() - 2) + x[:2],
        lambda x: (x, OUTSIDE)[0] if recording() is None else (recording().c_call("f", 0), x)[1],  # type: ignore[union-attr,func-returns-value]
        lambda x: (x, None)[0] if recording() is None else (recording().launch(None, (1, 1), (x,), ()), x)[1],  # type: ignore[union-attr,func-returns-value]
    ],
    ids=["numbers", "other memory", "memory before an argument", "library without address", "interpreted kernel"],
)
def test_what_cannot_be_repeated_runs_in_python_in_every_call(
    extension: Any, function: Callable[[Tensor], Tensor]
) -> None:
    replayed = Replayed(extension, function)
    for seed in range(6):
        x = same_key(68, seed=seed)[64:]
        assert torch.equal(replayed.call(x), function(x))
    assert (replayed.replays, replayed.kept) == (0, 0)


@pytest.mark.parametrize("unusual", [{"num_ctas": 2}, {"launch_pdl": True}, {"global_scratch_size": 8}], ids=str)
def test_unusual_launches_stay_with_triton(extension: Any, library: Library, unusual: dict[str, int]) -> None:
    noted = Recording([])
    noted.launch(library.kernel("scale", (), **unusual), (1, 1), (), ())
    assert noted.finished(None) is None


def test_a_function_that_computes_with_a_seed_or_returns_it_gets_the_number(extension: Any) -> None:
    for function in (lambda seed, x: x + seed % 7, lambda seed, x: (x, seed)):
        replayed = Replayed(extension, function)
        for seed in range(2**40, 2**40 + 5):
            x = same_key(4, seed=0)
            found, expected = replayed.call(seed, x), function(seed, x)
            assert type(found) is type(expected)
            assert not isinstance(found[1], Seed)
            pairs = zip(found, expected, strict=True)
            assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)
        assert replayed.replays == 0


def test_unknown_objects_are_not_remembered(extension: Any) -> None:
    replayed = Replayed(extension, lambda x, other: x)
    for other in (0.5, object(), [1]):
        for _ in range(3):
            replayed.call(same_key(4, seed=0), other)
    assert (replayed.replays, replayed.kept) == (0, 0)


def test_results_that_autograd_differentiates_come_from_python(extension: Any) -> None:
    replayed = Replayed(extension, lambda x: 2 * x)
    for seed in range(4):
        x = same_key(4, seed=seed).requires_grad_()
        replayed.call(x).sum().backward()
        assert torch.equal(x.grad, torch.full((4,), 2.0))
    assert replayed.replays == 0


# -- memory --------------------------------------------------------------------------------------------------------
def test_neither_a_recording_nor_a_replay_keeps_memory(extension: Any) -> None:
    seen: list[weakref.ref[Any]] = []

    def keep(x: Tensor) -> None:
        seen.append(weakref.ref(x.untyped_storage()))
        seen.append(weakref.ref(x))

    def function(x: Tensor) -> Tensor:
        first = torch.empty(8)
        run_opaque(keep, first)
        second = torch.empty(8)
        run_opaque(keep, second)
        return second

    replayed = Replayed(extension, function)
    for _ in range(4):
        x = same_key(4, seed=0)
        result = replayed.call(x)
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
    assert [set(last_uses) for _, last_uses in recorded[1]] == [set(), {0, 1}, set(), {3}]

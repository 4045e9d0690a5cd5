"""Replay in C++, really compiled: what is repeated on other memory, what needs a recording of its own, what is refused.

CUDA's driver is a library of C functions, so that launches compute on the host.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import re
import shutil
import subprocess
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from snip_megatron.precision import Format
from snip_megatron.quantization.kernels import replay_build
from snip_megatron.quantization.kernels.listing import listed
from snip_megatron.quantization.kernels.replay import (
    Launch,
    Product,
    Recording,
    Replayed,
    Seed,
    recording,
    run_opaque,
)
from snip_megatron.quantization.rounding import key_words

from .replay_library import Library
from .test_compiles import CAPTURED_TILES, SIDES, assembled

HOOKS = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)


@dataclass(frozen=True)
class Side:
    """An operand as a backend has them."""

    values: Tensor
    scale: Tensor | None
    scaling: str


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def extension(library: Library) -> Any:
    found = replay_build.compiled_extension()
    launch = library.address("launch")
    replay_build.configure(found, launch=launch, types=(Side,), hooks=HOOKS, stream=lambda _: 0)
    return found


def same_key(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers at an address that is a multiple of 256 and of nothing larger that matters."""
    memory = torch.empty(1 << 14, dtype=torch.uint8)
    start = -memory.data_ptr() % 256
    found = memory[start : start + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
    return found.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def scaled(library: Library, factor: int) -> Callable[..., Any]:
    """x·factor + 3 of the first numbers, by a kernel, in a function with views, zeros and torch's own arithmetic."""
    kernel = library.kernel("scale", ("*fp32", "*fp32", "i32", "constexpr"))
    address, launch = library.address("scale"), library.address("launch")

    def function(_: Any, x: Tensor, side: Side, count: int) -> Any:
        x = x.detach().view(-1)
        out = torch.zeros(count + 2)
        run_kernel(launch, address, (3, count), (x, out[1:]), factor)
        noted = recording()
        if noted is not None:
            noted.launch(kernel, (3, count), (x, out[1:]), (factor, True))
        mean = (side.values.t() @ out[:2].view(2, 1)).add_(out[2])
        return Side(out[1:], mean.t(), side.scaling), (out.view(torch.int32), None), x

    return function


def run_kernel(launch: int, function: int, grid: tuple[int, int], tensors: tuple[Tensor, ...], *numbers: int) -> None:
    """Launch as Python would."""
    values = [ctypes.c_uint64(t.data_ptr()) for t in tensors] + [ctypes.c_uint64(n) for n in (*numbers, 0, 0)]
    places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3)
    assert kind(launch)(function, *grid, 1, 128, 1, 1, 48, None, places, None) == 0


def flat(value: Any) -> list[Any]:
    if isinstance(value, Side):
        return [value.values, value.scale, value.scaling]
    return [part for each in value for part in flat(each)] if isinstance(value, tuple) else [value]


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
    replayed = Replayed(extension, lambda _, *given: (calls.append(given), given[0])[1], patience=0)
    for given in (BASE, BASE, changes, changes, BASE):
        replayed.call((), *arguments(**given))
    assert len(calls) == 2
    assert (replayed.replays, replayed.kept) == (3, 2)


def test_a_call_that_does_not_come_again_is_not_recorded(extension: Any) -> None:
    recorded = []

    def function(_: Any, x: Tensor) -> Tensor:
        recorded.append(recording() is not None)
        return x

    replayed = Replayed(extension, function)
    for tokens in (1, 2, 3, 2, 3, 2):
        replayed.call((), same_key(tokens, 4, seed=0))
    assert recorded == [False, False, False, True, True]
    assert (replayed.replays, replayed.kept) == (1, 2)


def test_calls_that_did_not_come_again_make_room(extension: Any) -> None:
    replayed = Replayed(extension, lambda _, x, number: x + number)
    x = same_key(4, seed=0)
    for number in range(4200):
        replayed.call((), x, number)
    for _ in range(3):
        assert torch.equal(replayed.call((), x, 5000), x + 5000)
    assert (replayed.replays, replayed.kept) == (1, 1)


# -- what is refused -----------------------------------------------------------------------------------------------
OUTSIDE = torch.ones(4)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * float(x.sum()),
        lambda x: x + OUTSIDE,
        lambda x: x.as_strided((2,), (1,), x.storage_offset() - 2) + x[:2],
        lambda x: (x, OUTSIDE)[0] if recording() is None else (recording().product(None), x)[1],  # type: ignore[union-attr]
        lambda x: (x, None)[0] if recording() is None else (recording().launch(None, (1, 1), (x,), ()), x)[1],  # type: ignore[union-attr,func-returns-value]
    ],
    ids=[
        "looks at numbers",
        "other memory",
        "memory before an argument",
        "library without address",
        "interpreted kernel",
    ],
)
def test_what_cannot_be_repeated_runs_in_python_in_every_call(
    extension: Any, function: Callable[[Tensor], Tensor]
) -> None:
    replayed = Replayed(extension, lambda _, x: function(x), patience=0)
    for seed in range(6):
        x = same_key(68, seed=seed)[64:]
        assert torch.equal(replayed.call((), x), function(x))
    assert (replayed.replays, replayed.kept) == (0, 0)


@pytest.mark.parametrize("unusual", [{"num_ctas": 2}, {"launch_pdl": True}, {"global_scratch_size": 8}], ids=str)
def test_unusual_launches_stay_with_triton(extension: Any, library: Library, unusual: dict[str, int]) -> None:
    noted = Recording([])
    noted.launch(library.kernel("scale", (), **unusual), (1, 1), (), ())
    assert noted.finished(None) is None


def test_a_first_call_that_looks_at_numbers_does_not_prevent_a_recording(extension: Any) -> None:
    known: list[float] = []

    def function(_: Any, x: Tensor) -> Tensor:
        if not known:
            known.append(float(OUTSIDE.sum()))
        return x.detach() * known[0]

    replayed = Replayed(extension, function, patience=0)
    for seed in range(4):
        x = same_key(4, seed=seed)
        assert torch.equal(replayed.call((), x), 4 * x)
    assert replayed.replays == 2


def test_a_function_that_computes_with_a_seed_or_returns_it_gets_the_number(extension: Any) -> None:
    for function in (lambda seeds, x: x + seeds[0] % 7, lambda seeds, x: (x, seeds[0])):
        replayed = Replayed(extension, function, patience=0)
        for seed in range(5):
            x = same_key(4, seed=seed)
            found, expected = replayed.call((seed,), x), function((seed,), x)
            assert type(found) is type(expected)
            assert not isinstance(found[1], Seed)
            pairs = zip(found, expected, strict=True)
            assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)
        assert replayed.replays == 0


def test_large_numbers_and_unknown_objects_are_not_remembered(extension: Any) -> None:
    replayed = Replayed(extension, lambda _, x, other: x, patience=0)
    for other in (2**31, 2**70, -(2**40), 0.5, object(), [1]):
        replayed.call((), same_key(4, seed=0), other)
        replayed.call((), same_key(4, seed=0), other)
    assert (replayed.replays, replayed.kept) == (0, 0)


def test_results_that_autograd_differentiates_come_from_python(extension: Any) -> None:
    replayed = Replayed(extension, lambda _, x: 2 * x, patience=0)
    for seed in range(3):
        x = same_key(4, seed=seed).requires_grad_()
        replayed.call((), x).sum().backward()
        assert torch.equal(x.grad, torch.full((4,), 2.0))
    assert replayed.replays == 0


def test_inference_mode_is_recorded_apart(extension: Any) -> None:
    replayed = Replayed(extension, lambda _, x: x @ x, patience=0)
    for _ in range(3):
        x = same_key(4, 4, seed=0)
        assert not replayed.call((), x).is_inference()
        with torch.inference_mode():
            assert replayed.call((), x).is_inference()
    assert (replayed.replays, replayed.kept) == (4, 2)


def test_under_autocast_python_runs_whose_dtype_may_change(extension: Any) -> None:
    replayed = Replayed(extension, lambda _, x: x @ x, patience=0)
    for _ in range(3):
        x = same_key(4, 4, seed=0)
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=dtype):
                assert replayed.call((), x).dtype is dtype
        assert replayed.call((), x).dtype is torch.float32
    assert (replayed.replays, replayed.kept) == (2, 1)


def test_views_of_tensors_from_outside_inference_mode_are_made_inside(extension: Any) -> None:
    replayed = Replayed(extension, lambda _, x: (x.t(), x.t() + 1), patience=0)
    for made_inside in (False, True):
        for used_inside in (True, False):
            for seed in range(3):
                with torch.inference_mode(made_inside):
                    x = same_key(4, 4, seed=seed)
                with torch.inference_mode(used_inside):
                    view, result = replayed.call((), x)
                    assert torch.equal(view + 1, result)
                    assert torch.equal(result, x.t() + 1)


def test_a_mode_of_torch_sees_every_function(extension: Any) -> None:
    replayed = Replayed(extension, lambda _, x: x + 1, patience=0)
    x = same_key(4, seed=0)
    for _ in range(2):
        replayed.call((), x)
    outer = Recording([x])
    with outer:
        found = replayed.call((), x)
    recorded = outer.finished(found)
    assert replayed.replays == 1
    assert recorded is not None
    assert len(recorded.steps) == 1


def test_listings_and_hooks_of_triton_see_every_launch(extension: Any) -> None:
    calls = []
    replayed = Replayed(extension, lambda _, x: (calls.append(0), x)[1], patience=0)
    x = same_key(4, seed=0)
    for _ in range(2):
        replayed.call((), x)
    with listed(run=True):
        replayed.call((), x)
    assert len(calls) == 2
    chain = SimpleNamespace(calls=[])
    for hook, seen in ((chain, 2), (print, 3), (None, 3)):
        HOOKS.launch_enter_hook = hook
        replayed.call((), x)
        assert len(calls) == seen
    chain.calls.append(print)
    HOOKS.launch_exit_hook = chain
    replayed.call((), x)
    HOOKS.launch_exit_hook = None
    assert len(calls) == 4


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


# -- compilation ---------------------------------------------------------------------------------------------------
def test_a_missing_or_failing_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    broken = tmp_path / "compiler"
    broken.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such header' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(subprocess.SubprocessError, match=r"compiler: x.cpp:1: error: no such header"):
        replay_build.compiled_extension()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: None)
    found, why = replay_build.replay_extension.__wrapped__(())
    assert found is None
    assert why.startswith("Python launches kernels (")
    assert "\n" not in why
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OSError, match="no C\\+\\+ compiler"):
        replay_build.compiled_extension()
    assert not list(tmp_path.glob("*.so"))


def test_a_library_in_a_cache_that_others_lock_or_that_cannot_be_written_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = replay_build._library(replay_build._command())
    replay_build.compiled_extension()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shutil.copy(made, tmp_path)
    monkeypatch.setattr(fcntl, "flock", lambda *_: pytest.fail("it waits for others"))
    assert hasattr(replay_build.compiled_extension(), "Table")
    assert [each.name for each in tmp_path.iterdir()] == [made.name]


def test_a_lock_that_is_never_released_is_waited_for_with_an_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(replay_build, "_PATIENCE", 0.2)
    with open(tmp_path / "lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with replay_build._locked(tmp_path / "lock"):
            entered = True
    assert entered


def test_a_file_system_without_locks_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)
    with replay_build._locked(tmp_path / "lock"):
        entered = True
    assert entered


def test_a_library_that_another_node_made_meanwhile_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its processes have mapped it."""
    library, compiler = tmp_path / "found.so", tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\necho theirs > {library}\nfor last; do :; done\necho ours > $last\n")
    compiler.chmod(0o755)
    replay_build._compile([str(compiler)], library)
    assert library.read_text() == "theirs\n"


def test_a_compiler_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(replay_build, "_PATIENCE", 0.2)
    with pytest.raises(subprocess.TimeoutExpired):
        replay_build._compile([str(compiler)], tmp_path / "found.so")


def test_a_machine_without_a_driver_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    found, why = replay_build.replay_extension.__wrapped__(())
    assert found is None
    assert "libcuda.so.1" in why

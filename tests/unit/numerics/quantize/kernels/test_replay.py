"""Replay in C++, really compiled: what is repeated on other memory, what needs a recording of its own, what is refused.

CUDA's driver is a library of C functions, so that launches compute on the host.
"""

import ctypes
import gc
import subprocess
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from snip_megatron.numerics.quantize.kernels import replay
from snip_megatron.numerics.quantize.kernels.launch import recording
from snip_megatron.numerics.quantize.kernels.replay import Replayed, run_opaque
from snip_megatron.numerics.quantize.rounding import key_words
from snip_megatron.precision import Format

from .replay_library import Library, Side, flat, same_key, scaled


# -- what is repeated ------------------------------------------------------------------------------
def test_a_replay_gives_what_the_function_gives_on_other_memory(extension: Any, library: Library) -> None:
    function = scaled(library, 5)
    replayed = Replayed(extension, function)
    for seed in range(5):
        x, side = same_key(3, 4, seed=seed), Side(same_key(2, 6, seed=seed + 9), None, "tile")
        result = replayed.call(x, side, 7)
        assert isinstance(result[0], Side)
        actual, expected = flat(result), flat(function(x, side, 7))
        assert len(actual) == len(expected) == 6
        for ours, truth in zip(actual, expected, strict=True):
            if isinstance(truth, Tensor):
                assert torch.equal(ours, truth)
                assert (ours.dtype, ours.stride()) == (truth.dtype, truth.stride())
            else:
                assert ours == truth
        assert actual[0].untyped_storage().data_ptr() == actual[3].untyped_storage().data_ptr()
        assert actual[5].data_ptr() == x.data_ptr()
    assert (replayed.replays, replayed.recordings) == (3, 1)


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


# -- what needs a recording of its own -------------------------------------------------------------
BASE = {"shape": (4, 4), "dtype": torch.float32, "stride": (4, 1), "offset": 0, "scale": None, "scaling": "tile",
        "number": 3, "format": Format.FP8}  # fmt: skip


def arguments(**changes: Any) -> tuple[Any, ...]:
    options = BASE | changes
    memory = same_key(256, seed=0).view(options["dtype"])
    x = memory.as_strided(options["shape"], options["stride"], memory.storage_offset() + options["offset"])
    scale = None if options["scale"] is None else same_key(*options["scale"], seed=1)
    return x, Side(same_key(2, seed=2), scale, options["scaling"]), options["number"], options["format"]


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
    replayed = Replayed(extension, lambda *args: (calls.append(args), args[0])[1])
    for args in (BASE, BASE, BASE, changes, changes, changes, BASE):
        replayed.call(*arguments(**args))
    assert len(calls) == 4
    assert (replayed.replays, replayed.recordings) == (3, 2)


# -- what is refused -------------------------------------------------------------------------------
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
    assert (replayed.replays, replayed.recordings) == (0, 0)


@pytest.mark.parametrize("compute", [int, lambda seed: seed & 7, lambda seed: seed ^ 7], ids=["int", "and", "xor"])
def test_a_gradient_is_added_once_where_the_function_computes_with_a_seed(
    extension: Any, compute: Callable[[Any], int]
) -> None:
    """The computation comes after the addition, so that a second run of the function would add twice."""

    def function(out: Tensor, pair: tuple[Any, ...]) -> Any:
        out.add_(1.0)
        return compute(pair[0]) % 5, pair

    replayed, out = Replayed(extension, function), torch.zeros(4)
    for call in range(1, 7):
        seed = 2**40 + call
        assert replayed.call(out, (seed,)) == (compute(seed) % 5, (seed,))
        assert out.tolist() == [float(call)] * 4
    assert (replayed.replays, replayed.recordings) == (0, 0)


# -- memory ----------------------------------------------------------------------------------------
def test_neither_a_recording_nor_a_replay_keeps_memory(extension: Any) -> None:
    calls: list[weakref.ref[Any]] = []

    def keep(x: Tensor) -> None:
        calls.append(weakref.ref(x.untyped_storage()))
        calls.append(weakref.ref(x))

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
        calls.append(weakref.ref(x))
        del x, result
    gc.collect()
    assert replayed.replays == 2
    assert not [each for each in calls if each() is not None]


def test_a_recording_keeps_what_owns_the_memory_of_its_arguments(extension: Any) -> None:
    class Owner:
        pass

    owners = [Owner()]
    owner_ref = weakref.ref(owners[0])
    address = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value or 0

    def function(x: Tensor, number: int) -> Tensor:
        if (noted := recording()) is not None:
            noted.c_call("abs", address, 0, owner=owners.pop())
        return x

    replayed = Replayed(extension, function)
    for seed in range(3):
        replayed.call(same_key(4, seed=seed), 0)
    assert replayed.replays == 1
    gc.collect()
    assert owner_ref() is not None
    for number in range(1, 4200):  # more kinds of calls than a table remembers
        replayed.call(same_key(4, seed=0), number)
    assert replayed.recordings == 0
    assert owner_ref() is None


# -- compilation -----------------------------------------------------------------------------------
def test_a_missing_or_failing_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    broken = tmp_path / "compiler"
    broken.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such header' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(subprocess.SubprocessError, match=r"compiler: x.cpp:1: error: no such header"):
        replay.compiled_extension()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: None)
    result, why = replay.replay_extension.__wrapped__()
    assert result is None
    assert why.startswith("Python launches kernels (")
    assert "\n" not in why
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OSError, match="no C\\+\\+ compiler"):
        replay.compiled_extension()
    assert not list(tmp_path.glob("*.so"))

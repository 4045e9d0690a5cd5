"""Replay in C++: which calls need a recording of their own, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from snip_megatron.precision import Format
from snip_megatron.quantization.kernels.listing import listed
from snip_megatron.quantization.kernels.replay import (
    Recording,
    Replayed,
    Seed,
    recording,
)

from .replay_library import HOOKS, Library, Side, same_key

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

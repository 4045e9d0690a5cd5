"""Looking at the next batches, and passes that are no training, change nothing for training."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, get_rerun_state_machine

from snip_megatron.megatron import compat
from snip_megatron.megatron.compat.loop import PeekableIterator
from snip_megatron.precision.errors import SnipError


def numbered(count: int) -> RerunDataIterator:
    return RerunDataIterator(iter([{"tokens": i} for i in range(count)]))


@given(st.lists(st.integers(0, 4), max_size=30), st.integers(0, 25))
def test_any_mix_of_peeks_and_reads(actions: list[int], length: int) -> None:
    """0 reads one; n > 0 peeks at n."""
    iterator = PeekableIterator(iter(range(length)))
    position = 0
    for action in actions:
        if action:
            assert iterator.peek(action) == list(range(position, min(position + action, length)))
        elif position < length:
            assert next(iterator) == position
            position += 1
    assert list(iterator) == list(range(position, length))


def test_peek_repeats_and_training_gets_the_same_objects() -> None:
    batches = [{"tokens": i} for i in range(5)]
    data = RerunDataIterator(iter(batches))
    assert next(data) is batches[0]
    for _ in range(2):
        repeats = list(compat.repeated(data, range(2)))
        assert repeats == batches[1:3]
        for batch in repeats:
            batch["tokens"] = None  # a forward step may do that to its dictionary
    assert [next(data) for _ in range(4)] == [{"tokens": i} for i in range(1, 5)]
    assert list(compat.repeated(data, ())) == []


def test_first_microbatches_of_the_latest_steps_are_kept() -> None:
    data = numbered(20)
    next(data)
    for step in range(3, 8):
        compat.keep_microbatches(data, step, 2)
        list(compat.repeated(data, range(1)))
        for batch in [next(data) for _ in range(3)]:
            batch["tokens"] = None  # a forward step may do that to its dictionary
    for _ in range(2):
        past = compat.past_microbatches(data, 6, 2)
        assert list(compat.repeated(past, [0, 1, 0])) == [{"tokens": 10}, {"tokens": 11}, {"tokens": 10}]
    assert [next(past)["tokens"] for _ in range(2)] == [10, 11]
    with pytest.raises(SnipError, match="step 4 were not kept"):
        compat.past_microbatches(data, 4, 2)
    with pytest.raises(SnipError, match="step 7 were not kept"):
        compat.past_microbatches(data, 7, 3)
    compat.keep_microbatches([data, None], 8, 1)
    assert next(data)["tokens"] == 16
    first, second = compat.past_microbatches([data, None], 8, 1)
    assert (next(first)["tokens"], second) == (16, None)


def test_virtual_pipeline_and_ranks_without_data() -> None:
    chunks: list[Any] = [numbered(3), None]
    first, second = compat.repeated(chunks, range(2))
    assert [b["tokens"] for b in first] == [0, 1]
    assert second is None
    assert compat.repeated(None, range(2)) is None


def test_a_step_that_the_rerun_machine_repeats() -> None:
    data = numbered(6)
    for _ in range(3):
        next(data)
    saved = [{"tokens": i} for i in range(3)]
    data.load_state_dict({"saved_microbatches": saved, "replaying": True, "replay_pos": 1})
    assert list(compat.repeated(data, range(2))) == saved[1:]
    assert next(data) == saved[1]


def test_external_loaders_keep_their_methods() -> None:
    class Loader:
        def __next__(self) -> int:
            return 1

        def save_state(self) -> str:
            return "state"

    data = RerunDataIterator(Loader())
    compat.repeated(data, range(1))
    assert data.iterable.save_state() == "state"  # type: ignore[attr-defined]
    assert not hasattr(data.iterable, "other")


def test_a_broken_loss_outside_of_training_does_not_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    machine = get_rerun_state_machine()
    result = {"result": torch.tensor(float("nan")), "rejection_func": torch.isnan, "message": "NaN", "tolerance": 0.0}
    with compat.rerun_disabled():
        machine.validate_result(**result, fatal=True)
    monkeypatch.setattr(machine, "mode", RerunMode.DISABLED)
    with pytest.raises(RuntimeError, match="NaN"):
        machine.validate_result(**result, fatal=True)

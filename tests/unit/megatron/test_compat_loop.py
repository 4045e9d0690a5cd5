"""Wrapping the training step; conditions under which a pass is not training; random states."""

from __future__ import annotations

import random
from types import SimpleNamespace

import megatron.training.training as training
import numpy as np
import pytest
import torch
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from snip_megatron.errors import SnipError
from snip_megatron.megatron import compat
from snip_megatron.megatron.startup import Startup


def test_without_a_hook_the_set_cannot_be_off(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SimpleNamespace(
        snip=True,
        load=None,
        save=None,
        exit_signal_handler=False,
        sequence_parallel=False,
        transformer_impl="local",
        use_distributed_optimizer=False,
    )
    off = Startup(on_cpu=False, disabled=frozenset({"step-hook", "dataset-helpers"}))
    with pytest.raises(SnipError, match="--snip-no-compat step-hook: this Megatron's source has no hook"):
        compat.apply(plain, off)
    allowed = Startup(on_cpu=False, disabled=frozenset({"dataset-helpers"}))
    assert compat.apply(plain, allowed) == ["step-hook: Megatron's train_step and evaluate wrapped at run time"]
    monkeypatch.setattr(training, "SNIP_HOOKS", {}, raising=False)
    assert compat.apply(plain, off) == []
    assert compat.apply(plain, allowed) == ["step-hook: this Megatron's source has it, nothing is patched at run time"]


def test_a_broken_loss_outside_of_training_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    machine = get_rerun_state_machine()

    def judge() -> None:
        machine.validate_result(
            result=torch.tensor(float("nan")), rejection_func=torch.isnan, message="NaN", tolerance=0.0, fatal=True
        )

    with compat.rerun_disabled():
        judge()
    before, machine.mode = machine.mode, RerunMode.DISABLED
    try:
        with pytest.raises(RuntimeError, match="NaN"):
            judge()
    finally:
        machine.mode = before


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(1))]  # noqa: NPY002


def test_random_states_come_back_and_can_be_set_again() -> None:
    tracker = get_cuda_rng_tracker()
    before_states, before_initialized = tracker.get_states(), tracker.is_initialized()
    tensor, generator = torch.get_rng_state(), torch.Generator().manual_seed(3)
    tracker.set_states({"tensor": tensor, "generator": generator})
    try:
        state = compat.rng_state()
        first = [*draw(), float(torch.rand(1, generator=generator))]
        for _ in range(2):
            tracker.states_["tensor"] = torch.zeros_like(tensor)
            compat.set_rng_state(state)
            assert [*draw(), float(torch.rand(1, generator=generator))] == first
            assert torch.equal(tracker.get_states()["tensor"], tensor)
            assert tracker.get_states()["generator"] is generator
    finally:
        tracker.set_states(before_states)
        tracker._is_initialized = before_initialized

"""Wrapping the training step; conditions under which a pass is not training."""

from types import SimpleNamespace

import megatron.training.training as training
import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from megatron.core.transformer import TransformerConfig

from snip_megatron.megatron import compat
from snip_megatron.megatron.startup import Startup
from snip_megatron.precision.errors import SnipError


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


def test_the_wgrad_of_a_probe_s_only_microbatch_is_not_deferred() -> None:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=True,
        defer_embedding_wgrad_compute=True,
    )
    weight = torch.zeros(4, 8)
    module = SimpleNamespace(
        embedding_activation_buffer=[torch.ones(2, 8)],
        grad_output_buffer=[torch.ones(2, 4)],
        share_embeddings_and_output_weights=True,
        output_layer=SimpleNamespace(weight=weight),
    )
    with compat.quiet_schedule(config):
        schedules.finish_embedding_wgrad_compute(config, module, True, None)
    assert config.defer_embedding_wgrad_compute

"""Conditions under which a pass is not training."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from megatron.core.transformer import TransformerConfig

from snip_megatron.megatron import compat


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

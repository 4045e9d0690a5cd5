"""Models of Megatron's Transformer Engine layers on a CPU.

Transformer Engine's modules can be built there if CUDA seems to be present. Their own forward needs a GPU, that of a
converted linear does not. The attention core and norms that are modules of their own are replaced by torch's.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import small_decoder
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch_attention import TorchAttention

DENSE: dict[str, Any] = small_decoder.DENSE | {
    "gradient_accumulation_fusion": False, "hidden_dropout": 0.0, "attention_dropout": 0.0, "bias_dropout_fusion": False
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 128, "moe_grouped_gemm": True,
    "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "allgather", "hidden_size": 128,
}  # fmt: skip
SWIGLU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False}


class Ignored:
    """A recorder that keeps nothing."""

    def on_backward(self, *tensors: torch.Tensor) -> None: ...


@contextlib.contextmanager
def seeming_cuda() -> Iterator[None]:
    """Let modules be built that ask for a device."""
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.current_device", return_value="cpu"),
        mock.patch("torch.cuda.Stream"),
    ):
        yield


def dense(*, delay_wgrad: bool = False, **changes: Any) -> GPTModel:
    """A decoder of Transformer Engine's layers, FP32 unless ``params_dtype`` is given."""
    torch.manual_seed(0)
    config = TransformerConfig(**(DENSE | changes))
    config.delay_wgrad_compute = delay_wgrad  # Megatron takes it with experts only
    with seeming_cuda():
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
        spec.submodules.self_attention.submodules.core_attention = TorchAttention
        model = GPTModel(config, spec, 128, 32)
    return with_torch_norms(model)


def with_torch_norms(model: GPTModel) -> GPTModel:
    """Replace each norm that is a module by torch's, with the same parameters, where torch has such a norm."""
    if model.config.layernorm_zero_centered_gamma:
        return model
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if type(norm).__name__ in ("RMSNorm", "LayerNorm") and "transformer_engine" in type(norm).__module__:
                config = model.config
                replacement = WrappedTorchNorm(config, norm.weight.shape[0], config.layernorm_epsilon)
                replacement.load_state_dict(norm.state_dict(), strict=False)
                setattr(parent, name, replacement)
    return model

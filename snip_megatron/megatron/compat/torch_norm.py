"""``torch-norm-sequence-parallel``: allows ``torch.nn.RMSNorm`` and ``LayerNorm`` under ``--sequence-parallel``.

Megatron's wrapper refuses the combination. A norm works on each token alone, so it can run on shards of the sequence.
Only the gradients of its weights must be summed over the tensor parallel group. Megatron's ``finalize_model_grads``
does that for parameters marked ``sequence_parallel``.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.torch_norm import WrappedTorchNorm

from snip_megatron.megatron.compat.versions import check_signature

check_signature(WrappedTorchNorm.__new__, "cls", "config", "hidden_size", "eps")
_original = WrappedTorchNorm.__new__


def install() -> str:
    """Let Megatron's wrapper build norms under sequence parallelism. Returns a description for the list at start."""
    WrappedTorchNorm.__new__ = _build
    return "torch norms accepted, their gradients summed over the tensor-parallel group"


def _build(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
    sequence_parallel = config.sequence_parallel
    config.sequence_parallel = False
    try:
        norm = _original(cls, config, *args, **kwargs)
    finally:
        config.sequence_parallel = sequence_parallel
    for parameter in norm.parameters():
        parameter.sequence_parallel = sequence_parallel
    return norm

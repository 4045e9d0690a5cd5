"""Multi-token prediction without Transformer Engine, which Megatron 0.20 cannot build. Megatron 0.19 can.

Megatron 0.20 asks whether a linear is one of two classes for inference. Without Transformer Engine they are no classes,
and ``isinstance`` raises TypeError.
"""

from contextlib import AbstractContextManager, nullcontext

from megatron.core.transformer import multi_token_prediction

from snip_megatron.megatron.compat.versions import changed


def _is_for_inference(module: object) -> bool:
    return False


def is_broken() -> bool:
    """Return whether Megatron's question fails."""
    try:
        getattr(multi_token_prediction, "is_inference_column_parallel_linear", bool)(None)
    except TypeError:
        return True
    return False


def repaired() -> AbstractContextManager[None]:
    """Answer inside this context that no linear is one for inference, if the question fails."""
    if not is_broken():
        return nullcontext()
    return changed(multi_token_prediction, is_inference_column_parallel_linear=_is_for_inference)


def repair() -> str:
    """Answer so in this process. Returns a description for the list printed at start."""
    multi_token_prediction.is_inference_column_parallel_linear = _is_for_inference
    return "multi-token prediction built without Transformer Engine"

"""A script's call of ``pretrain``.

It takes a configuration container that may hold the model's configuration, or a model provider beside it.
"""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import megatron.training.training as training
from megatron.core.utils import get_model_config
from megatron.training import global_vars

from snip_megatron.errors import SnipError


def bound_call(positional: Sequence[Any], named: Mapping[str, Any]) -> inspect.BoundArguments:
    """Return the arguments of a script's call of ``pretrain``, by name. Raises SnipError if Megatron's takes others."""
    try:
        return inspect.signature(training.pretrain).bind(*positional, **named)
    except TypeError as error:
        raise SnipError(f"attach(): Megatron's pretrain() cannot be called like this: {error}") from error


def parsed_arguments() -> argparse.Namespace:
    """Return Megatron's validated arguments, which the script parsed. Raises SnipError if it did not."""
    if global_vars._GLOBAL_ARGS is None:
        raise SnipError("attach(): pretrain() was called before the script parsed Megatron's arguments")
    args: argparse.Namespace = global_vars._GLOBAL_ARGS
    return args


@contextmanager
def hooked_model(call: inspect.BoundArguments, *, on_cpu: bool) -> Iterator[Any]:
    """Give the model of a call hooks inside this context, and yield what holds ``pre_wrap_hooks``.

    That is the model's own configuration, or a model provider that takes the place of the script's in the call.

    Args:
        call: The call, from :func:`bound_call`.
        on_cpu: Whether there is no CUDA device. Outputs sent through gloo must not be freed early there.

    Raises:
        SnipError: If the call has neither a model configuration nor a model provider.
    """
    given = call.arguments
    model = getattr(given.get("cfg_container"), "model", None)
    if model is None:
        if given.get("model_provider") is None:
            raise SnipError("attach(): pretrain() got neither a model configuration nor a model_provider")
        model = given["model_provider"] = HookedProvider(given["model_provider"])
    before = list(model.pre_wrap_hooks)
    if on_cpu:
        model.pre_wrap_hooks.append(_keep_outputs)
    try:
        yield model
    finally:
        model.pre_wrap_hooks[:] = before


def _keep_outputs(model_chunks: list[Any]) -> list[Any]:
    """See :func:`snip_megatron.megatron.compat.pretraining.model_config`."""
    for chunk in model_chunks:
        get_model_config(chunk).deallocate_pipeline_outputs = False
    return model_chunks


class HookedProvider:
    """A script's own model provider, with the hooks of Megatron's model configuration.

    Args:
        provide: Builds one model chunk.

    Attributes:
        pre_wrap_hooks: Functions that are called once with all chunks of this rank, when the last one is built. They
            may only change chunks in place.
        transformer_layer_spec: None. The layer spec is the script's: one that is set here has no effect.
    """

    def __init__(self, provide: Callable[..., Any]) -> None:
        self.transformer_layer_spec: Any = None
        self.pre_wrap_hooks: list[Callable[[list[Any]], list[Any]]] = []
        self._provide = provide
        self._chunks: list[Any] = []
        functools.update_wrapper(self, provide)  # Megatron may look at the signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build one model chunk. Raises SnipError if a hook replaces chunks."""
        chunk = self._provide(*args, **kwargs)
        self._chunks.append(chunk)
        if len(self._chunks) == (global_vars.get_args().virtual_pipeline_model_parallel_size or 1):
            chunks, self._chunks = self._chunks, []
            for hook in self.pre_wrap_hooks:
                if any(a is not b for a, b in zip(hook(chunks), chunks, strict=True)):
                    raise SnipError("a pre-wrap hook replaced a model chunk, which a model provider does not allow")
        return chunk

"""A script's call of ``pretrain``, whose parameters differ between versions of Megatron.

0.19 takes a configuration container that may hold the model's configuration, or a model provider beside it. 0.18 takes
the container and a model provider. 0.17 takes a model provider and parses the command line itself.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import megatron.training.training as training
from megatron.core.utils import get_model_config
from megatron.training import global_vars

from snip_megatron.errors import SnipError
from snip_megatron.megatron.compat import pretraining
from snip_megatron.megatron.compat.model_chunks import HookedProvider
from snip_megatron.megatron.compat.versions import MEGATRON_VERSION


class PretrainCall:
    """The arguments of one call of ``pretrain``.

    Args:
        positional, named: The arguments that the script gave.

    Raises:
        SnipError: If Megatron's ``pretrain`` does not take them.
    """

    def __init__(self, positional: Sequence[Any], named: Mapping[str, Any]) -> None:
        try:
            self._bound = inspect.signature(training.pretrain).bind(*positional, **named)
        except TypeError as error:
            raise SnipError(f"attach(): Megatron's pretrain() cannot be called like this: {error}") from error

    @property
    def positional(self) -> tuple[Any, ...]:
        """The positional arguments to call ``pretrain`` with."""
        return self._bound.args

    @property
    def named(self) -> dict[str, Any]:
        """The keyword arguments to call ``pretrain`` with."""
        return self._bound.kwargs

    def parsed_arguments(self) -> argparse.Namespace:
        """Return Megatron's validated arguments: those that the script parsed, or that 0.17 is going to parse."""
        given = self._bound.arguments
        if MEGATRON_VERSION < (0, 18):
            provide = given.get("extra_args_provider") or _nothing_added
            return pretraining.parse_arguments(provide, given.get("args_defaults") or {})
        if global_vars._GLOBAL_ARGS is None:
            raise SnipError("attach(): pretrain() was called before the script parsed Megatron's arguments")
        args: argparse.Namespace = global_vars._GLOBAL_ARGS
        return args

    @contextmanager
    def hooked_model(self, *, on_cpu: bool) -> Iterator[Any]:
        """Give the model hooks inside this context, and yield what holds ``pre_wrap_hooks``.

        That is the model's own configuration, or a model provider that takes the place of the script's in the call.

        Args:
            on_cpu: Whether there is no CUDA device. Outputs sent through gloo must not be freed early there.

        Raises:
            SnipError: If the call has neither a model configuration nor a model provider.
        """
        given = self._bound.arguments
        model = getattr(given.get("cfg_container"), "model", None) if MEGATRON_VERSION >= (0, 19) else None
        if model is None:
            provider = given.get("model_provider")
            if provider is None:
                raise SnipError("attach(): pretrain() got neither a model configuration nor a model_provider")
            model = given["model_provider"] = HookedProvider(provider)
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


def _nothing_added(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    return parser

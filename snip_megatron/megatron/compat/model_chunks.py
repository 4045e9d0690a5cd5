"""Hooks on built model chunks where a function builds them one by one, without a configuration that holds hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron.training import get_args

from snip_megatron.errors import SnipError


@dataclass(kw_only=True)
class HookedChunks:
    """The part of Megatron 0.19's model configuration that SNIP sets.

    Attributes:
        transformer_layer_spec: A spec, or a function of the model configuration that returns one.
        pre_wrap_hooks: Functions that are called once with all chunks of this rank, when the last one is built. They
            may only change chunks in place.
    """

    transformer_layer_spec: Any = None
    pre_wrap_hooks: list[Callable[[list[Any]], list[Any]]] = field(default_factory=list)
    _chunks: list[Any] = field(default_factory=list)

    def built(self, chunk: Any) -> Any:
        """Note a chunk, and call the hooks when it is the last one. Raises SnipError if a hook replaces chunks."""
        self._chunks.append(chunk)
        if len(self._chunks) == (get_args().virtual_pipeline_model_parallel_size or 1):
            chunks, self._chunks = self._chunks, []
            for hook in self.pre_wrap_hooks:
                if any(a is not b for a, b in zip(hook(chunks), chunks, strict=True)):
                    raise SnipError("a pre-wrap hook replaced a model chunk, which needs megatron-core >= 0.19")
        return chunk


class HookedProvider(HookedChunks):
    """A script's own model provider, with hooks. Its layer spec is the script's: the one set here has no effect.

    Args:
        provide: Builds one model chunk. Called with the arguments of the installed version of Megatron.
    """

    def __init__(self, provide: Callable[..., Any]) -> None:
        super().__init__()
        self._provide = provide
        functools.update_wrapper(self, provide)  # Megatron may look at the signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build one model chunk."""
        return self.built(self._provide(*args, **kwargs))

"""A job of Megatron's own FP8 or FP4 for ``--snip-blame``: its recipe, and where its scales begin."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from snip_megatron.layers.context import LinearHandle
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.megatron.compat.megatron_precision import delayed_state, shared_amax
from snip_megatron.megatron.watched_modules import by_module, modules_watched
from snip_megatron.numerics.products.host_recipe import HostRecipe
from snip_megatron.precision import Gemm, LinearId, PrecisionMap, option_id
from snip_megatron.runtime import gemm_check
from snip_megatron.runtime.blame_passes import Job
from snip_megatron.runtime.exact_products import RecipeNumerics

BOUND = gemm_check.BOUND | {4: 8.0}
"""Bits → least signal to noise ratio in dB. Healthy linears of Transformer Engine on an H200 have at least 46 dB in
eight bits and in bf16 (reductions over up to 768 numbers; more of them lose more, as fprop accumulates in few bits). In
four bits gradients are rounded with other draws than the reference's; no card that has them has run it."""

State = tuple[Tensor, Tensor]


def host_job(recipe: HostRecipe, args: argparse.Namespace, registry: LinearRegistry) -> Job:
    """Return the job. The scales of delayed scaling are those of the checkpoint, which has been loaded."""
    first = args.num_layers_at_start_in_bf16 if args.first_last_layers_bf16 else 0
    last = args.num_layers_at_end_in_bf16 if args.first_last_layers_bf16 else 0

    def is_quantized(name: str) -> bool:
        linear = LinearId.parse(name)
        return linear.stack != "decoder" or first <= linear.layer < args.num_layers - last

    names = [name for name in registry.names if is_quantized(name)]
    formats = PrecisionMap(choices={option_id(name, gemm): recipe.format for name in names for gemm in Gemm})
    stay = len(registry.names) - len(names)
    description = f"{recipe}" + (f", {stay} linears in bf16" if stay else "")
    numerics = RecipeNumerics(recipe)
    if recipe.name == "delayed":
        saved = _Histories(recipe, registry)
        numerics = RecipeNumerics(recipe, saved.of, shared_amax(args), saved.restore)
    keeps_weights = not getattr(args, "disable_parameter_transpose_cache", False)
    watch = partial(modules_watched, registry, recipe, keeps_weights=keeps_weights)
    return Job("megatron", description, formats, numerics, watch, BOUND)


class _Histories:
    """The histories of delayed scaling as they were when training would have begun."""

    def __init__(self, recipe: HostRecipe, registry: LinearRegistry) -> None:
        self._recipe, self._modules = recipe, by_module(registry)
        self._saved = {key: (history.clone(), scale.clone()) for _, key, (history, scale) in self._states()}

    def _states(self) -> Iterator[tuple[LinearHandle, tuple[int, int, str], State]]:
        """Yield what Transformer Engine has now, with the module's first linear and (module, expert, operand)."""
        for module, handles in self._modules:
            for expert, operand in itertools.product(range(len(handles)), ("x", "w", "g")):
                if (state := delayed_state(module, expert, operand)) is not None:
                    yield handles[0], (id(module), expert, operand), state

    def of(self, handle: LinearHandle, expert: int, operand: str) -> State:
        """Return the history and the scale with which the step begins: those of a new run if none were loaded."""
        saved = self._saved.get((id(handle.module), expert, operand))
        device = handle.weight.device
        return saved or (torch.zeros(self._recipe.history, device=device), torch.ones((), device=device))

    def restore(self) -> None:
        """Let Transformer Engine begin with them again."""
        for handle, (_, expert, operand), state in self._states():
            for target, source in zip(state, self.of(handle, expert, operand), strict=True):
                target.copy_(source)

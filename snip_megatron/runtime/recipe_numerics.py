"""The reference of a job under one of Megatron's own recipes, as the passes of ``--snip-blame`` need it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from snip_megatron.layers.context import LinearHandle
from snip_megatron.numerics.products.host_recipe import DelayedScale, HostRecipe, RecipeGemms, ScaleOf
from snip_megatron.numerics.quantize.operands import ExactOperand
from snip_megatron.runtime.exact_products import ExactBackend

Histories = Callable[[LinearHandle, int, str], tuple[Tensor, Tensor]]
"""Returns the history of amaxes and the scale with which the step begins, for a linear, the index of its expert on this
rank, and "x", "w" or "g"."""


class RecipeNumerics(RecipeGemms, ExactBackend):
    """A recipe's numerics. Under delayed scaling each linear has its own, from its history in the checkpoint on.

    Args:
        recipe: the recipe.
        histories: where delayed scaling begins. None under any other recipe.
        shared: takes the maximum of an amax over the ranks that share histories. A collective if there are several.
        restart: called at the start of every pass.
    """

    name = "recipe"

    def __init__(
        self,
        recipe: HostRecipe,
        histories: Histories | None = None,
        shared: Callable[[Tensor], Tensor] = lambda amax: amax,
        restart: Callable[[], None] = lambda: None,
        scale_of: ScaleOf | None = None,
    ) -> None:
        super().__init__(recipe, scale_of)
        self._histories, self._shared, self._restart = histories, shared, restart
        self._linears: dict[int, _LinearScales] = {}

    def of(self, handle: LinearHandle, *, after_backward: bool = False) -> ExactBackend:
        """See the base class."""
        if self._histories is None:
            return self
        scales = self._linears.get(id(handle))
        if scales is None:
            scales = self._linears[id(handle)] = _LinearScales(handle, self.recipe, self._histories, self._shared)
        return RecipeNumerics(self.recipe, scale_of=partial(scales.of, after_backward))

    def start_pass(self) -> None:
        """See the base class."""
        self._restart()
        for scales in self._linears.values():
            scales.restart()

    def numbers(self, operand: Any) -> Tensor:
        """See the base class."""
        return operand.dequantize() if isinstance(operand, ExactOperand) else super().numbers(operand)


class _LinearScales:
    """The scales of one linear, or of all experts of a linear, in the microbatches of a pass."""

    def __init__(
        self, handle: LinearHandle, recipe: HostRecipe, histories: Histories, shared: Callable[[Tensor], Tensor]
    ) -> None:
        self._handle, self._recipe, self._histories, self._shared = handle, recipe, histories, shared
        self.restart()

    def restart(self) -> None:
        self._scales: dict[tuple[int, str], DelayedScale] = {}
        self._forwards: Counter[int] = Counter()

    def of(self, after_backward: bool, expert: int, operand: str, x: Tensor) -> Tensor:
        """Return a scale. A forward inside a backward is that of a recomputed microbatch, which has its scale already.

        A weight is quantised in the first microbatch.
        """
        key = expert, operand
        if key not in self._scales:
            history, scale = self._histories(self._handle, expert, operand)
            maximum = self._recipe.element(operand).maximum * 2.0**-self._recipe.margin
            self._scales[key] = DelayedScale(maximum, history, scale, self._recipe.most_recent, self._shared)
        microbatch = 0
        if operand != "w" and torch._C._current_graph_task_id() != -1:
            microbatch = self._handle.state.backwards - after_backward
        elif operand != "w":
            microbatch, self._forwards[expert] = self._forwards[expert], self._forwards[expert] + 1
        return self._scales[key].of(microbatch, x)

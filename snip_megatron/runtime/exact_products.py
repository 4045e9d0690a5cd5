"""The exact numerics of a job's formats, or of Megatron's own recipe, with which ``--snip-blame`` compares kernels.

The reference shares only torch's quantisers with the job's backends, so that it does not repeat their faults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from snip_megatron.layers.context import LinearHandle
from snip_megatron.numerics.products.backend import FlatOperand, GemmBackend, UnquantizedOperand
from snip_megatron.numerics.products.grouped import GroupLoop
from snip_megatron.numerics.products.host_recipe import DelayedScale, RecipeGemms
from snip_megatron.numerics.quantize.operands import CachedPair, ExactOperand, OperandPair, OperandSpec
from snip_megatron.numerics.quantize.reference import fake_quantize
from snip_megatron.precision import Format, Gemm


class ExactBackend(GemmBackend):
    """The reference's numerics, by functions that the job's backends do not use: torch's quantisers, FP32 products."""

    name = "exact"

    def of(self, handle: LinearHandle, *, after_backward: bool = False) -> ExactBackend:
        """Return the numerics of one linear. ``after_backward`` says that its backward has been counted already."""
        return self

    def start_pass(self) -> None:
        """Forget what an earlier pass left."""

    def quantize(self, x: Tensor, spec: OperandSpec, cached: CachedPair | None = None) -> OperandPair:
        row, col = (
            None if fmt is None else UnquantizedOperand(x, axis, spec)
            for fmt, axis in zip(spec.formats, (1, 0), strict=True)
        )
        return row, col

    def numbers(self, operand: UnquantizedOperand) -> Tensor:
        """Return the numbers that the GEMM multiplies, in FP32."""
        if operand.format is Format.BF16:
            return operand.tensor.float()
        x, options = operand.spec.quantizer_arguments(operand.tensor, operand.axis)
        return fake_quantize(x, **options)

    def multiply(self, gemm: Gemm, a: Any, b: Any, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        left, right = self.numbers(a), self.numbers(b)
        product = {Gemm.FPROP: lambda: left @ right.t(), Gemm.DGRAD: lambda: left @ right}.get(
            gemm, lambda: left.t() @ right
        )()
        return product.to(dtype) if out is None else out.add_(product)

    def forward(self, x: Tensor, w: Any, spec: OperandSpec) -> tuple[Tensor, FlatOperand | None]:
        return GEMM_METHODS[0](self, x, w, spec)  # type: ignore[no-any-return]

    def backward(self, g: Tensor, w: Any, x: FlatOperand, spec: OperandSpec, out: Tensor | None) -> Any:
        return GEMM_METHODS[1](self, g, w, x, spec, out)

    def grouped(self, n: int, k: int, dtype: torch.dtype) -> GroupLoop:
        return _ExactGroups(self.quantize, self.multiply)


GEMM_METHODS: Any = GemmBackend.forward, GemmBackend.backward


class _ExactGroups(GroupLoop):
    """The loop over experts, by functions that were bound when this module was imported."""

    quantize_rows, quantize_weights = GroupLoop.quantize_rows, GroupLoop.quantize_weights
    quantize_expert = GroupLoop.quantize_expert
    multiply, accumulate = GroupLoop.multiply, GroupLoop.accumulate


EXACT = ExactBackend()


# -- Megatron's own recipes --------------------------------------------------------------------------------------------
Histories = Callable[[LinearHandle, int, str], tuple[Tensor, Tensor]]
"""Returns the history of amaxes and the scale with which the step begins, for a linear, the index of its expert on this
rank, and "x", "w" or "g"."""


@dataclass(eq=False)
class RecipeNumerics(RecipeGemms, ExactBackend):
    """A recipe's numerics. Under delayed scaling each linear has its own, from its history in the checkpoint on."""

    histories: Histories | None = None  # where delayed scaling begins. None under any other recipe
    # takes the maximum of an amax over the ranks that share histories. A collective if there are several
    shared: Callable[[Tensor], Tensor] = lambda amax: amax
    restart: Callable[[], None] = lambda: None  # called at the start of every pass
    # _scales, _forwards: of a pass, by linear and expert: scales of operands, and numbers of forwards so far
    _scales: dict[tuple[int, int, str], DelayedScale] = field(default_factory=dict)
    _forwards: Counter[tuple[int, int]] = field(default_factory=Counter)

    name = "recipe"

    def of(self, handle: LinearHandle, *, after_backward: bool = False) -> ExactBackend:
        """See the base class."""
        if self.histories is None:
            return self
        return RecipeNumerics(self.recipe, scale_of=partial(self._scale, self.histories, handle, after_backward))

    def start_pass(self) -> None:
        """See the base class."""
        self.restart()
        self._scales.clear()
        self._forwards.clear()

    def numbers(self, operand: Any) -> Tensor:
        """See the base class."""
        return operand.dequantize() if isinstance(operand, ExactOperand) else super().numbers(operand)

    def _scale(
        self, histories: Histories, handle: LinearHandle, after_backward: bool, expert: int, operand: str, x: Tensor
    ) -> Tensor:
        """Return a scale. A forward inside a backward is that of a recomputed microbatch, which has its scale already.

        A weight is quantised in the first microbatch.
        """
        linear = id(handle), expert
        if (key := (*linear, operand)) not in self._scales:
            history, scale = histories(handle, expert, operand)
            maximum = self.recipe.element(operand).maximum * 2.0**-self.recipe.margin
            self._scales[key] = DelayedScale(maximum, history, scale, self.recipe.most_recent, self.shared)
        microbatch = 0
        if operand != "w" and torch._C._current_graph_task_id() != -1:
            microbatch = handle.state.backwards - after_backward
        elif operand != "w":
            microbatch, self._forwards[linear] = self._forwards[linear], self._forwards[linear] + 1
        return self._scales[key].of(microbatch, x)

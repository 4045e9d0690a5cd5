"""Watches the GEMMs of grouped experts, each expert's as one product. See :mod:`snip_megatron.runtime.watched`.

The job's own grouped kernels run, but for the fusion of SwiGLU with quantisation: between two linears that are fused,
nothing stands that could be compared.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from snip_megatron.layers.autograd import LinearCall, main_grad_of
from snip_megatron.layers.grouped import GroupedCall, gradient_spec, transform_of
from snip_megatron.numerics.products.grouped import GroupLoop, of_expert
from snip_megatron.numerics.quantize.operands import OperandSpec
from snip_megatron.precision import Formats, Gemm
from snip_megatron.runtime.exact_products import Product, Watcher


class UnfusedGroups:
    """The grouped products of a backend, without those that one launch fuses with SwiGLU or the host does not see."""

    def __init__(self, inner: GroupLoop) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def fuses_swiglu(self, formats: object) -> bool:
        """Return False: SwiGLU runs between two linears."""
        return False

    def takes_device_rows(self, formats: object) -> bool:
        """Return False: the numbers of rows are on the host."""
        return False


class ExpertProduct(Product):
    """The linear of one expert in one microbatch. Its scales are those of this rank's shard."""

    redraws = True  # tiles of a whole layer have the key of its first expert

    def __init__(self, call: GroupedCall, place: int, x: Tensor, formats: Formats) -> None:
        linear: LinearCall = call.linear._replace(handle=call.handles[place])
        super().__init__(linear, x, call.weights[place], formats)
        self.summed = None  # the token dispatcher sums
        self._place = place

    def start(self, g: Tensor, spec: OperandSpec) -> None:
        """Note the rows of G, and how G of all experts is quantised."""
        self.g, self._g_spec = g, of_expert(spec, self._place)

    def operands(self, gemm: Gemm, formats: Formats | None = None) -> list[tuple[Tensor, OperandSpec, int]]:
        fprop, dgrad, wgrad = formats or self.formats
        transform = transform_of(self.handle, wgrad)
        g_spec = OperandSpec(dgrad, wgrad, rotation=transform) if formats is not None else self._g_spec
        if gemm is Gemm.FPROP:
            return [(self._x, OperandSpec(fprop, None), 1), (self.weight, OperandSpec(fprop, None, weight=True), 1)]
        assert self.g is not None
        assert g_spec is not None
        if gemm is Gemm.DGRAD:
            return [(self.g, g_spec, 1), (self.weight, OperandSpec(None, dgrad, weight=True), 0)]
        return [(self.g, g_spec, 0), (self._x, OperandSpec(None, wgrad, rotation=transform), 0)]


def watched_functions(watcher: Watcher, library: str, forward: Any, backward: Any) -> dict[str, Callable[..., Any]]:
    """Return both functions of the autograd function of grouped linears, which pass products to a watcher."""

    def split(rows: Tensor, splits: Sequence[int]) -> tuple[Tensor, ...]:
        return torch.split(rows.detach(), list(splits))

    def watched_forward(ctx: Any, x: Tensor, splits: Sequence[int], call: GroupedCall, *weights: Tensor) -> Tensor:
        y: Tensor = forward(ctx, x, splits, call, *weights)
        of_experts = zip(call.handles, split(x, splits), strict=True)
        ctx.products = [
            ExpertProduct(call, place, rows, watcher.formats_of(handle))
            for place, (handle, rows) in enumerate(of_experts)
        ]
        for product, result in zip(ctx.products, split(y, splits), strict=True):
            watcher.on_result(product, Gemm.FPROP, result, None, library)
        return y

    def watched_backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        call: GroupedCall = ctx.call
        g, splits, products = grad_outputs[0].contiguous(), ctx.splits, ctx.products
        formats = products[0].formats
        spec = gradient_spec(call._replace(formats=formats), g)
        for product, rows in zip(products, split(g, splits), strict=True):
            product.start(rows, spec)
        main_grads = [
            main_grad_of(product.handle, weight) for product, weight in zip(products, call.weights, strict=True)
        ]
        before = [None if each is None else each.clone() for each in main_grads]
        result: tuple[Tensor | None, ...] = backward(ctx, *grad_outputs)
        of_weights: Sequence[Tensor | None] = result[3:] or [None] * len(products)
        assert result[0] is not None
        of_experts = zip(products, split(result[0], splits), main_grads, of_weights, before, strict=True)
        for product, dgrad, main_grad, grad, earlier in of_experts:
            watcher.on_result(product, Gemm.DGRAD, dgrad, None, library)
            wgrad = grad if main_grad is None else main_grad
            if wgrad is not None:
                watcher.on_result(product, Gemm.WGRAD, wgrad, earlier, library)
            watcher.on_backward(product, dgrad)
        return result

    return {"forward": staticmethod(watched_forward), "backward": staticmethod(watched_backward)}

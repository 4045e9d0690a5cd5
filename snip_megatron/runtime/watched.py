"""Watches the GEMMs of a pass from outside: their inputs, and what the job's own backend made of them.

While :func:`watched` is open, the autograd function of every linear passes its inputs to a watcher, and a backend
around the job's own one passes each product. The job's path runs as in training, with its cached weights and its fused
kernels. Training itself knows nothing of this module.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from snip_megatron.layers import swiglu
from snip_megatron.layers.autograd import LinearCall, PrequantizedTensor, QuantizedLinear
from snip_megatron.layers.context import StepContext
from snip_megatron.layers.grouped import GroupedLinear
from snip_megatron.numerics.products.backend import FlatOperand, GemmBackend, matrix
from snip_megatron.numerics.products.grouped import GroupLoop
from snip_megatron.numerics.quantize.operands import OperandPair, OperandSpec
from snip_megatron.numerics.quantize.swiglu import swiglu as plain_swiglu
from snip_megatron.numerics.quantize.swiglu import swiglu_gradient as plain_gradient
from snip_megatron.precision import Gemm
from snip_megatron.runtime.exact_products import Product, Watcher
from snip_megatron.runtime.watched_experts import UnfusedGroups, watched_functions


class _WatchedBackend(GemmBackend):
    """The job's backend, which passes every product to a watcher."""

    def __init__(self, inner: GemmBackend, watcher: Watcher) -> None:
        self.inner, self.watcher = inner, watcher
        self.name, self.products, self.fuses_swiglu = inner.name, inner.products, inner.fuses_swiglu
        self.running: Product | None = None

    def _report(self, gemm: Gemm, result: Tensor, before: Tensor | None = None) -> None:
        if self.running is not None:
            library = self.inner.products or self.name
            self.watcher.on_result(self.running, gemm, result.detach(), before, library)

    def swiglu_kernel(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.swiglu_kernel(*args, **kwargs)

    def swiglu(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.swiglu(*args, **kwargs)

    def quantize(self, *args: Any, **kwargs: Any) -> OperandPair:
        return self.inner.quantize(*args, **kwargs)

    def multiply(self, gemm: Gemm, a: Any, b: Any, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        before = None if out is None or gemm is not Gemm.WGRAD else out.clone()
        result = self.inner.multiply(gemm, a, b, dtype, out)
        self._report(gemm, result, before)
        return result

    def forward(self, x: Tensor, w: Any, spec: OperandSpec) -> tuple[Tensor, FlatOperand | None]:
        if self.running is not None and self.running.call.sequence_parallel:
            self.watcher.on_gather(self.running, matrix(x))
        y, saved = self.inner.forward(x, w, spec)
        self._report(Gemm.FPROP, matrix(y))
        return y, saved

    def backward(self, g: Tensor, w: Any, x: FlatOperand, spec: OperandSpec, out: Tensor | None) -> Any:
        before = None if out is None else out.clone()
        d, grad_weight = self.inner.backward(g, w, x, spec, out)
        self._report(Gemm.DGRAD, matrix(d))
        self._report(Gemm.WGRAD, grad_weight, before)
        return d, grad_weight

    def grouped(self, n: int, k: int, dtype: torch.dtype) -> GroupLoop:
        return UnfusedGroups(self.inner.grouped(n, k, dtype))  # type: ignore[return-value]


@contextmanager
def watched(context: StepContext, watcher: Watcher) -> Iterator[None]:
    """Pass the GEMMs of all linears to ``watcher`` inside this context."""
    inner = context.backend
    backend = _WatchedBackend(inner, watcher)
    run_forward, run_backward = QuantizedLinear.forward, QuantizedLinear.backward

    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
        ctx.product = backend.running = Product(call, x, weight, watcher.formats_of(call.handle))
        try:
            return run_forward(ctx, x, weight, bias, call)
        finally:
            backend.running = None

    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        product: Product = ctx.product
        product.start_backward(grad_outputs[0])
        backend.running = product
        try:
            result = run_backward(ctx, *grad_outputs)
        finally:
            backend.running = None
        watcher.on_backward(product, matrix(result[0]))
        return result

    with ExitStack() as stack:
        stack.callback(setattr, context, "backend", inner)
        context.backend = backend
        _replace(stack, QuantizedLinear, forward=staticmethod(forward), backward=staticmethod(backward))
        library = inner.products or inner.name
        experts = GroupedLinear.forward, GroupedLinear.backward
        _replace(stack, GroupedLinear, **watched_functions(watcher, library, *experts))
        _keep_sources(stack)
        yield


def _replace(stack: ExitStack, owner: type, **functions: Any) -> None:
    for name, function in functions.items():
        stack.callback(setattr, owner, name, owner.__dict__[name])
        setattr(owner, name, function)


def _keep_sources(stack: ExitStack) -> None:
    """Let fused SwiGLU, and its gradient, keep what a linear's quantised input or gradient was made of."""
    fused = swiglu._Fused
    run_forward, run_backward = fused.forward, fused.backward

    def forward(ctx: Any, y: Tensor, result: Callable[[], Tensor], gradient: Any) -> Tensor:
        x = run_forward(ctx, y, result, gradient)
        if isinstance(x, PrequantizedTensor):
            plain = y.detach()
            x.source = lambda: plain_swiglu(plain)  # type: ignore[attr-defined]
        return x

    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        g, *rest = run_backward(ctx, *grad_outputs)
        if isinstance(g, PrequantizedTensor):
            (y,), d = ctx.saved_tensors, grad_outputs[0].detach()
            g.source = lambda: plain_gradient(d, y.detach())  # type: ignore[attr-defined]
        return g, *rest

    _replace(stack, fused, forward=staticmethod(forward), backward=staticmethod(backward))

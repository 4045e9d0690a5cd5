"""Watches the GEMMs of a pass from outside: their inputs, and the products of the job's own backend.

While :func:`watched` is open, the autograd function of every linear passes its inputs to a watcher, and a backend
around the job's own one passes each product. The job's path runs as in training, with its cached weights and its fused
kernels. Only SwiGLU between two linears of grouped experts runs apart from quantisation, because the fused launch
returns no product that could be compared. Training does not use this module.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from snip_megatron.layers import swiglu
from snip_megatron.layers.autograd import (
    LinearCall,
    PrequantizedTensor,
    QuantizedLinear,
    gradient_keys,
    main_grad_of,
)
from snip_megatron.layers.context import LinearHandle, StepContext
from snip_megatron.layers.grouped import GroupedCall, GroupedLinear, gradient_spec, transform_of
from snip_megatron.numerics.products.backend import FlatOperand, GemmBackend, matrix
from snip_megatron.numerics.products.grouped import GroupLoop, of_expert
from snip_megatron.numerics.quantize.operands import OperandSpec
from snip_megatron.numerics.quantize.swiglu import swiglu as plain_swiglu
from snip_megatron.numerics.quantize.swiglu import swiglu_gradient as plain_gradient
from snip_megatron.precision import Format, Formats, Gemm
from snip_megatron.runtime.exchange import is_true_on_any

FormatsOf = Callable[[LinearHandle], Formats]

_all_gather = dist.all_gather  # bound now: a job that replaces the function later must not replace the check


class Product:
    """One linear in one microbatch: its inputs, as autograd passed them.

    Attributes:
        formats: Formats of (fprop, dgrad, wgrad) of the job.
        weight: The local shard of the weight, from the parameter.
        g: G [T, N] with all tokens. None in the forward.
        expert: Index of the expert among those of this rank. None if there is none.
        summed: The GEMM whose result the linear sums over tensor parallel ranks. None if there is none.
        parts: The parts of all tensor parallel ranks of the latest product, if it is their sum.
        redraws: Whether the job's kernels may round gradients by other random numbers than the reference.
    """

    redraws = False

    def __init__(self, call: LinearCall, x: Tensor, weight: Tensor, formats: Formats) -> None:
        self.call, self.formats, self.weight = call, formats, weight.detach()
        self.g: Tensor | None = None
        self.parts: list[Tensor] = []
        self._x = x
        self._g_spec: OperandSpec | None = None
        handle, sums_gradients = call.handle, call.sequence_parallel or call.allreduce_dgrad
        is_row = handle.parallel == "row" and handle.tp_size > 1 and handle.expert is None
        self.summed = Gemm.FPROP if is_row else Gemm.DGRAD if sums_gradients else None

    @property
    def handle(self) -> LinearHandle:
        return self.call.handle

    def x(self) -> Tensor:
        """Return X [T, K] with all tokens. Collective of tensor parallel ranks under sequence parallelism."""
        x = self._x
        if isinstance(x, PrequantizedTensor):
            x = x.source()  # type: ignore[attr-defined]
        return matrix(torch.cat(of_ranks(x, self.call.tp_group)) if self.call.sequence_parallel else x.detach())

    def start_backward(self, g: Tensor) -> None:
        """Note G. Collective of tensor parallel ranks as :meth:`x`."""
        call = self.call
        if isinstance(g, PrequantizedTensor):
            g = g.source()  # type: ignore[attr-defined]
        g = matrix(torch.cat(of_ranks(g, call.tp_group)) if call.reduce_scatter else g.detach()).contiguous()
        _, dgrad, wgrad = self.formats
        keys = gradient_keys(call, g, dgrad, wgrad)
        self.g = g
        self._g_spec = self.handle.spec("g", g, dgrad, wgrad, keys)

    def operands(self, gemm: Gemm, formats: Formats | None = None) -> list[tuple[Tensor, OperandSpec, int]]:
        """Return both matrices of a GEMM, how each is quantised, and which dimension the GEMM reduces over.

        ``formats`` replaces those of the job.
        """
        fprop, dgrad, wgrad = formats or self.formats
        if gemm is Gemm.FPROP:
            x = self.x()
            return [(x, self.spec("x", x, fprop, None), 1), (self.weight, self.spec("w", self.weight, fprop, None), 1)]
        g_spec = self._g_spec if formats is None else OperandSpec(dgrad, wgrad)
        assert self.g is not None
        assert g_spec is not None
        if gemm is Gemm.DGRAD:
            return [(self.g, g_spec, 1), (self.weight, self.spec("w", self.weight, None, dgrad), 0)]
        x = self.x()
        return [(self.g, g_spec, 0), (x, self.spec("x", x, None, wgrad), 0)]

    def spec(self, operand: str, x: Tensor, rowwise: Format | None, columnwise: Format | None) -> OperandSpec:
        """Return how X or W is quantised. It may be a collective of tensor parallel ranks."""
        return self.handle.spec(operand, x, rowwise, columnwise)

    def exact(self, gemm: Gemm, numerics: GemmBackend, formats: Formats | None = None) -> Tensor:
        """Return the product by the reference's numerics, in FP32."""
        return self.multiplied(gemm, self.operands(gemm, formats), numerics)

    def multiplied(
        self, gemm: Gemm, operands: Sequence[tuple[Tensor, OperandSpec, int]], numerics: GemmBackend
    ) -> Tensor:
        """Do the same for ``operands``, which :meth:`operands` has returned."""
        left, right = (numerics.quantize(x, spec)[1 - axis] for x, spec, axis in operands)
        return numerics.multiply(gemm, left, right, torch.float32)


def of_ranks(x: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return a tensor of every rank of a group, by another collective than the linears use."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    _all_gather(parts, x.detach().contiguous(), group=group)
    return parts


class Watcher:
    """Receives the GEMMs of a pass. The methods do nothing unless a subclass overrides them.

    Attributes:
        formats_of: Returns the formats of the job.
        end: The value of ``time.monotonic()`` after which no more products are received. Infinite by default.
        is_late: Whether a product came later.
    """

    def __init__(self, formats_of: FormatsOf) -> None:
        self.formats_of, self.end, self.is_late = formats_of, math.inf, False

    def receives(self, product: Product) -> bool:
        """Return whether a product comes in time. Collective of tensor parallel ranks, which compare it together."""
        self.is_late = self.is_late or time.monotonic() > self.end
        group = product.handle.tp_group
        if group is not None and math.isfinite(self.end):
            self.is_late = is_true_on_any(self.is_late, product.weight.device, group)
        return not self.is_late

    def on_result(self, product: Product, gemm: Gemm, result: Tensor, before: Tensor | None, library: str) -> None:
        """Compare a result. That of wgrad has been added to ``before``, if given."""

    def on_gather(self, product: Product, x: Tensor) -> None:
        """Compare the tokens that a linear has gathered. Collective of tensor parallel ranks."""

    def on_backward(self, product: Product, gradient: Tensor) -> None:
        """Note a finished backward, and the gradient [rows, K] that it returned for the input."""


# -- while a pass runs -------------------------------------------------------------------------------------------------
class _WatchedBackend:
    """The job's backend, which passes every product to a watcher."""

    def __init__(self, inner: GemmBackend, watcher: Watcher) -> None:
        self.inner, self.watcher = inner, watcher
        self.running: Product | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _report(self, gemm: Gemm, result: Tensor, before: Tensor | None = None) -> None:
        if self.running is not None:
            library = self.inner.products or self.inner.name
            self.watcher.on_result(self.running, gemm, result.detach(), before, library)

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
        groups = self.inner.grouped(n, k, dtype)
        # SwiGLU runs between two linears, in a launch of its own, and the numbers of rows are on the host.
        groups.fuses_swiglu = lambda formats: False  # type: ignore[method-assign]
        groups.takes_device_rows = lambda formats: False  # type: ignore[method-assign]
        return groups


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
        context.backend = backend  # type: ignore[assignment]
        _replace(stack, QuantizedLinear, forward=staticmethod(forward), backward=staticmethod(backward))
        _replace(stack, GroupedLinear, **_functions_of_experts(watcher, inner.products or inner.name))
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
        g, *gradients = run_backward(ctx, *grad_outputs)
        if isinstance(g, PrequantizedTensor):
            (y,), d = ctx.saved_tensors, grad_outputs[0].detach()
            g.source = lambda: plain_gradient(d, y.detach())  # type: ignore[attr-defined]
        return g, *gradients

    _replace(stack, fused, forward=staticmethod(forward), backward=staticmethod(backward))


# -- grouped experts ---------------------------------------------------------------------------------------------------
class _ExpertProduct(Product):
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

    def x(self) -> Tensor:
        return self._x

    def spec(self, operand: str, x: Tensor, rowwise: Format | None, columnwise: Format | None) -> OperandSpec:
        rotation = None if operand == "w" or columnwise is None else transform_of(self.handle, columnwise)
        return OperandSpec(rowwise, columnwise, weight=operand == "w", rotation=rotation)


def _functions_of_experts(watcher: Watcher, library: str) -> dict[str, Callable[..., Any]]:
    """Return both functions of the autograd function of grouped linears, which pass products to a watcher."""
    forward, backward = GroupedLinear.forward, GroupedLinear.backward

    def split(rows: Tensor, splits: Sequence[int]) -> tuple[Tensor, ...]:
        return torch.split(rows.detach(), list(splits))

    def watched_forward(ctx: Any, x: Tensor, splits: Sequence[int], call: GroupedCall, *weights: Tensor) -> Tensor:
        y: Tensor = forward(ctx, x, splits, call, *weights)
        of_experts = zip(call.handles, split(x, splits), strict=True)
        ctx.products = [
            _ExpertProduct(call, place, rows, watcher.formats_of(handle))
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

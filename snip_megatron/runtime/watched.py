"""Watches the GEMMs of a pass from outside: their inputs, and what the job's own backend made of them.

While :func:`watched` is open, the autograd function of every linear passes its inputs to a watcher, and a backend
around the job's own one passes each product. The job's path runs as in training, with its cached weights and its fused
kernels. Training itself knows nothing of this module.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from snip_megatron.layers import swiglu
from snip_megatron.layers.autograd import LinearCall, PrequantizedTensor, QuantizedLinear, gradient_keys
from snip_megatron.layers.context import LinearHandle, StepContext
from snip_megatron.numerics.products.backend import FlatOperand, GemmBackend, UnquantizedOperand, matrix
from snip_megatron.numerics.products.grouped import GroupLoop
from snip_megatron.numerics.quantize.operands import CachedPair, OperandPair, OperandSpec
from snip_megatron.numerics.quantize.reference import fake_quantize
from snip_megatron.numerics.quantize.swiglu import swiglu as plain_swiglu
from snip_megatron.numerics.quantize.swiglu import swiglu_gradient as plain_gradient
from snip_megatron.precision import Format, Formats, Gemm

_all_gather = dist.all_gather  # what a job replaces later is not what checks it


class ExactBackend(GemmBackend):
    """The reference's numerics, by functions that the job's backends do not use: torch's quantisers, FP32 products."""

    name = "exact"

    def of(self, handle: LinearHandle, *, after_backward: bool = False) -> "ExactBackend":
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
    multiply, accumulate = GroupLoop.multiply, GroupLoop.accumulate


EXACT = ExactBackend()


class Product:
    """One linear in one microbatch: its inputs, as autograd passed them.

    Attributes:
        formats: Formats of (fprop, dgrad, wgrad) of the job.
        weight: The local shard of the weight, from the parameter.
        g: G [T, N] with all tokens. None in the forward.
        expert: Index of the expert among those of this rank. None if there is none.
        is_partial: Whether the result of fprop of a row-parallel linear is that before the sum over ranks.
    """

    is_partial = True

    def __init__(self, call: LinearCall, x: Tensor, weight: Tensor, formats: Formats) -> None:
        self.call, self.formats, self.weight = call, formats, weight.detach()
        self.g: Tensor | None = None
        self._x = x
        self._g_spec: OperandSpec | None = None

    @property
    def handle(self) -> LinearHandle:
        return self.call.handle

    def x(self) -> Tensor:
        """Return X [T, K] with all tokens. Collective of tensor parallel ranks under sequence parallelism."""
        x = self._x
        if isinstance(x, PrequantizedTensor):
            x = x.source()  # type: ignore[attr-defined]
        return matrix(_gathered(x, self.call.tp_group) if self.call.sequence_parallel else x.detach())

    def start_backward(self, g: Tensor) -> None:
        """Note G. Collective of tensor parallel ranks as :meth:`x`."""
        call = self.call
        if isinstance(g, PrequantizedTensor):
            g = g.source()  # type: ignore[attr-defined]
        g = matrix(_gathered(g, call.tp_group) if call.reduce_scatter else g.detach()).contiguous()
        _, dgrad, wgrad = self.formats
        keys = gradient_keys(call, g, dgrad, wgrad)
        self.g = g
        self._g_spec = self.handle.spec("g", g, dgrad, wgrad, keys)

    def operands(self, gemm: Gemm, formats: Formats | None = None) -> list[tuple[Tensor, OperandSpec, int]]:
        """Return both matrices of a GEMM, how each is quantised, and which dimension the GEMM reduces over.

        ``formats`` replaces those of the job.
        """
        fprop, dgrad, wgrad = formats or self.formats
        handle, g_spec = self.handle, self._g_spec
        if formats is not None and self.g is not None:
            g_spec = OperandSpec(dgrad, wgrad)
        if gemm is Gemm.FPROP:
            x = self.x()
            return [(x, handle.spec("x", x, fprop, None), 1), (self.weight, self._weight_spec(fprop, None), 1)]
        assert self.g is not None
        assert g_spec is not None
        if gemm is Gemm.DGRAD:
            return [(self.g, g_spec, 1), (self.weight, self._weight_spec(None, dgrad), 0)]
        x = self.x()
        return [(self.g, g_spec, 0), (x, handle.spec("x", x, None, wgrad), 0)]

    def _weight_spec(self, fprop: Format | None, dgrad: Format | None) -> OperandSpec:
        return self.handle.spec("w", self.weight, fprop, dgrad)

    def exact(self, gemm: Gemm, numerics: GemmBackend, formats: Formats | None = None) -> Tensor:
        """Return the product by the reference's numerics, in FP32."""
        return self.multiplied(gemm, self.operands(gemm, formats), numerics)

    def multiplied(
        self, gemm: Gemm, operands: Sequence[tuple[Tensor, OperandSpec, int]], numerics: GemmBackend
    ) -> Tensor:
        """Do the same for ``operands``, which :meth:`operands` has returned."""
        left, right = (numerics.quantize(x, spec)[1 - axis] for x, spec, axis in operands)
        return numerics.multiply(gemm, left, right, torch.float32)


def _gathered(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the token shards of all ranks along dimension 0, by another collective than the linears use."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    _all_gather(parts, x.detach().contiguous(), group=group)
    return torch.cat(parts)


class Watcher(Protocol):
    """Receives the GEMMs of a pass."""

    def formats_of(self, handle: LinearHandle) -> Formats:
        """Return the formats of the job."""

    def on_result(self, product: Product, gemm: Gemm, result: Tensor, before: Tensor | None, library: str) -> None:
        """Compare a result. That of wgrad has been added to ``before``, if given."""

    def on_backward(self, product: Product) -> None:
        """Note a finished backward."""


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
        check = getattr(self.watcher, "on_gather", None)
        if check is not None and self.running is not None and self.running.call.sequence_parallel:
            check(self.running, matrix(x))
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
        return self.inner.grouped(n, k, dtype)


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
        watcher.on_backward(product)
        return result

    with ExitStack() as stack:
        stack.callback(setattr, context, "backend", inner)
        context.backend = backend
        _replace(stack, QuantizedLinear, forward=staticmethod(forward), backward=staticmethod(backward))
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


def restored_formats(formats: Formats, gemms: Sequence[Gemm]) -> Formats:
    """Return formats with some GEMMs in bf16."""
    fprop, dgrad, wgrad = (Format.BF16 if g in gemms else f for g, f in zip(Gemm, formats, strict=True))
    return fprop, dgrad, wgrad

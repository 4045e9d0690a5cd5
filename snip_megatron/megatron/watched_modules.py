"""Watches linears that run the host's own code, for ``--snip-blame``: Transformer Engine's, and Megatron's in bf16.

They multiply inside a module. What goes in and comes out is compared: the input and output, their gradients, and
``main_grad``. Sums over tensor parallel ranks inside a module are computed here by other collectives, and a norm inside
it by the functions that SNIP's own linears use. Of Megatron's linears the product alone is watched, without the sum
that a row-parallel one computes afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from snip_megatron.layers.autograd import LinearCall
from snip_megatron.layers.context import LinearHandle, StepContext
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.megatron.compat.megatron_precision import delayed_state
from snip_megatron.numerics.products.backend import GemmBackend, matrix
from snip_megatron.numerics.products.host_recipe import HostRecipe
from snip_megatron.numerics.quantize.operands import OperandSpec
from snip_megatron.precision import Format, Formats, Gemm
from snip_megatron.runtime.watched import Product, Watcher, of_ranks, watched


@contextmanager
def modules_watched(
    handles: Iterable[LinearHandle],
    recipe: HostRecipe | None,
    context: StepContext,
    watcher: Watcher,
    *,
    keeps_weights: bool = True,
) -> Iterator[None]:
    """Pass the GEMMs of linears that run the host's own code to ``watcher`` inside this context.

    ``recipe`` is that of Transformer Engine, whose quantised weights stay for a step with ``keeps_weights``. Without
    one, the linears are in bf16.
    """
    with ExitStack() as stack:
        for module, of_module in by_module(handles):
            watch = _ModuleWatch(module, of_module, recipe, watcher, keeps_weights=keeps_weights)
            name = "_forward_impl" if watch.is_megatron else "forward"
            setattr(module, name, partial(watch.run, getattr(module, name)))
            stack.callback(delattr, module, name)
            for index, handle in enumerate(of_module):
                weight: Any = handle.weight
                stack.callback(weight.register_hook(partial(watch.on_weight_gradient, index)).remove)
        yield


@contextmanager
def linears_watched(registry: LinearRegistry, context: StepContext, watcher: Watcher) -> Iterator[None]:
    """Pass the GEMMs of all linears of a job under SNIP to ``watcher``, with those that stay Megatron's in bf16."""
    stock = [handle for handle in registry if handle.is_stock]
    with watched(context, watcher), modules_watched(stock, None, context, watcher):
        yield


def by_module(handles: Iterable[LinearHandle]) -> list[tuple[Any, list[LinearHandle]]]:
    """Return every module with its linears, which are several only where one module has all experts."""
    modules: dict[int, tuple[Any, list[LinearHandle]]] = {}
    for handle in handles:
        modules.setdefault(id(handle.module), (handle.module, []))[1].append(handle)
    return list(modules.values())


class _Tap(torch.autograd.Function):
    """The identity, which passes the gradient of its result to a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, on_gradient: Callable[[Tensor], None]) -> Tensor:
        ctx.on_gradient = on_gradient
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        ctx.on_gradient(grad_outputs[0])
        return grad_outputs[0], None


def _tapped(x: Tensor, on_gradient: Callable[[Tensor], None]) -> Tensor:
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _Tap.apply(x, on_gradient)  # type: ignore[no-untyped-call,no-any-return]


class _ModuleWatch:
    """Watches one module."""

    def __init__(
        self,
        module: Any,
        handles: Sequence[LinearHandle],
        recipe: HostRecipe | None,
        watcher: Watcher,
        *,
        keeps_weights: bool,
    ) -> None:
        self.is_megatron = hasattr(module, "_forward_impl")  # of which the product alone is watched
        self.mode: str | None = None  # "column" or "row" if what is watched exchanges as such a linear
        if not self.is_megatron:
            self.mode = getattr(module, "parallel_mode", None) if handles[0].tp_size > 1 else None
        elif handles[0].parallel == "column" and not module.explicit_expert_comm:
            self.mode = "column" if module.sequence_parallel or module.allreduce_dgrad else None
        self.shards = self.mode is not None and bool(module.sequence_parallel)  # whether it exchanges tokens
        self.module, self.handles, self.recipe, self.watcher = module, handles, recipe, watcher
        self._keeps_weights = keeps_weights
        self._weight_scales: list[Tensor | None] | None = None
        self._of_recomputed: deque[list[Tensor | None]] = deque()
        self.running: _Call | None = None

    def run(self, forward: Callable[..., Any], input: Tensor | None, *arguments: Any, **named: Any) -> Any:
        """Run and watch the forward of the module, or the product of a linear of Megatron."""
        if input is None:  # a call for an MLP of experts, which multiplies later
            return forward(input, *arguments, **named)
        call = _Call(self, input, arguments[0] if arguments and len(self.handles) > 1 else None)
        output = forward(_tapped(input, call.on_input_gradient), *arguments, **named)
        y, *others = [output] if self.is_megatron else output
        call.finish_forward(y)
        y = _tapped(y, call.on_output_gradient)
        return y if self.is_megatron else (y, *others)

    def on_weight_gradient(self, index: int, gradient: Tensor) -> None:
        """Compare the gradient that autograd gets for a weight, unless the module has added it to ``main_grad``."""
        if self.running is not None and not self.accumulates:
            self.running.report_wgrad(index, gradient, None)

    @property
    def accumulates(self) -> bool:
        """Whether wgrad is added to ``main_grad`` inside the module."""
        name = "gradient_accumulation_fusion" if self.is_megatron else "fuse_wgrad_accumulation"
        return bool(getattr(self.module, name, False))

    def scales(self, operand: str) -> list[Tensor | None]:
        """Return the scales of an operand that the latest forward, or the next backward, quantises with."""
        if self.recipe is None or self.recipe.name != "delayed":
            return [None] * len(self.handles)
        states = [delayed_state(self.module, e, operand) for e in range(len(self.handles))]
        return [None if state is None else state[1].clone() for state in states]

    def forward_scales(self) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Return the scales of X and W. A recomputed forward has those of the first one."""
        x, w = self.scales("x"), self.scales("w")
        if torch._C._current_graph_task_id() != -1 and self._of_recomputed:
            x = self._of_recomputed.popleft()
        elif not torch.is_grad_enabled():
            self._of_recomputed.append(x)
        if self._weight_scales is None or not self._keeps_weights:
            self._weight_scales = w
        return x, self._weight_scales


class _Call:
    """One forward of a module, and its backward."""

    def __init__(self, watch: _ModuleWatch, x: Tensor, splits: Any) -> None:
        self.watch, self.input, self.before = watch, x.detach(), list[Tensor | None]()
        self.splits = None if splits is None else [int(count) for count in splits]
        self.products: list[_ModuleProduct] = []

    def finish_forward(self, y: Tensor) -> None:
        """Compare the result of fprop."""
        watch = self.watch
        handles, module = watch.handles, watch.module
        x_scales, w_scales = watch.forward_scales()
        x = self.input
        if hasattr(module, "layer_norm_weight"):
            # Delayed scaling knows the scale before the norm, whose kernel then casts to FP8 without a step in bf16.
            formats = watch.watcher.formats_of(handles[0])
            is_fused = watch.recipe is not None and watch.recipe.name == "delayed" and Format.BF16 not in formats
            with torch.no_grad():
                x = _normalized(module, x, exact=is_fused)
        for index, (handle, part, result) in enumerate(zip(handles, self._parts(x), self._parts(y), strict=True)):
            product = _ModuleProduct(watch, handle, part, {"x": x_scales[index], "w": w_scales[index]})
            self.products.append(product)
            rows, bias = matrix(result.detach()), self._bias(index)
            self._report(product, Gemm.FPROP, rows if bias is None else rows.float() - bias.detach().float())

    def on_output_gradient(self, g: Tensor) -> None:
        """Note G, before the module's own backward."""
        scales = self.watch.scales("g")
        for product, part, scale in zip(self.products, self._parts(g), scales, strict=True):
            product.start_backward(part)
            product.scales["g"] = scale
        self.watch.running = self
        self.before = [
            None if (grad := getattr(handle.weight, "main_grad", None)) is None else grad.clone()
            for handle in self.watch.handles
        ]

    def on_input_gradient(self, d: Tensor) -> None:
        """Compare the results of dgrad and wgrad, after the module's own backward."""
        module, norm = self.watch.module, hasattr(self.watch.module, "layer_norm_weight")
        for product, part in zip(self.products, self._parts(d), strict=True):
            product.through = partial(_norm_gradient, module, self.input) if norm else None
            self._report(product, Gemm.DGRAD, matrix(part))
        if self.watch.accumulates and not self.watch.handles[0].delays:
            for index, (handle, before) in enumerate(zip(self.watch.handles, self.before, strict=True)):
                if before is not None:
                    self.report_wgrad(index, handle.weight.main_grad, before)  # type: ignore[attr-defined]
        for product, part in zip(self.products, self._parts(d), strict=True):
            self.watch.watcher.on_backward(product, matrix(part))

    def report_wgrad(self, index: int, result: Tensor, before: Tensor | None) -> None:
        """Compare ∇W of one linear."""
        if self.products[index].g is not None:
            self._report(self.products[index], Gemm.WGRAD, result, before)

    def _report(self, product: _ModuleProduct, gemm: Gemm, result: Tensor, before: Tensor | None = None) -> None:
        library = "megatron" if self.watch.is_megatron else "transformer_engine"
        self.watch.watcher.on_result(product, gemm, result.detach(), before, library)

    def _parts(self, x: Tensor) -> Sequence[Tensor]:
        """Return the rows of each expert, or all of them."""
        return [x] if self.splits is None else torch.split(x, self.splits)

    def _bias(self, index: int) -> Tensor | None:
        """Return the bias that the module has added itself."""
        module = self.watch.module
        if self.watch.is_megatron:
            return None if self.watch.handles[0].parallel == "row" or module.skip_bias_add else module.bias
        if not module.use_bias or not module.apply_bias or module.te_return_bias:
            return None
        bias: Tensor = getattr(module, "bias" if self.splits is None else f"bias{index}")
        return bias


class _ModuleProduct(Product):
    """A linear of the host's own code in one microbatch."""

    # what lies between dgrad and the gradient of the module's input. None if nothing does
    through: Callable[[Tensor], Tensor] | None = None

    def __init__(self, watch: _ModuleWatch, handle: LinearHandle, x: Tensor, scales: dict[str, Tensor | None]) -> None:
        mode, shards = watch.mode, watch.shards
        call = LinearCall(
            handle, sequence_parallel=shards and mode == "column", tp_group=handle.tp_group,
            reduce_scatter=shards and mode == "row",
        )  # fmt: skip
        super().__init__(call, x, handle.weight, watch.watcher.formats_of(handle))
        self.recipe, self._shards = watch.recipe, shards
        self.scales = scales  # of "x", "w" and "g" under delayed scaling
        self._sums = {"row": Gemm.FPROP, "column": Gemm.DGRAD}.get(mode or "")
        if self._sums is not None or not watch.is_megatron:
            self.summed = None  # the sum is compared with the product

    def multiplied(
        self, gemm: Gemm, operands: Sequence[tuple[Tensor, OperandSpec, int]], numerics: GemmBackend
    ) -> Tensor:
        """See the base class. It is what the module returns: the sum over ranks, and this rank's tokens of it."""
        names = {Gemm.FPROP: "xw", Gemm.DGRAD: "gw", Gemm.WGRAD: "gx"}[gemm]
        left, right = (self._numbers(name, *each) for name, each in zip(names, operands, strict=True))
        product = left.t() @ right if gemm is Gemm.WGRAD else left @ (right.t() if gemm is Gemm.FPROP else right)
        through = self.through if gemm is Gemm.DGRAD and self.through is not None else lambda d: d
        self.parts = []
        if gemm is self._sums:
            self.parts = of_ranks(product, self.handle.tp_group)
            if self._shards:
                place = dist.get_rank(self.handle.tp_group)
                self.parts = [part.chunk(len(self.parts))[place] for part in self.parts]
            product = torch.stack(self.parts).sum(0)
            self.parts = [through(part) for part in self.parts]
        return through(product)

    def _numbers(self, name: str, x: Tensor, spec: OperandSpec, axis: int) -> Tensor:
        if self.recipe is None or spec.formats[1 - axis] is Format.BF16:
            return x.float()
        return self.recipe.quantize(x, name, axis, scale=self.scales.get(name)).dequantize()

    def operands(self, gemm: Gemm, formats: Formats | None = None) -> list[tuple[Tensor, OperandSpec, int]]:
        """See the base class, without amaxes of other ranks: every rank has the scales of its own operands."""
        fprop, dgrad, wgrad = formats or self.formats
        if gemm is Gemm.FPROP:
            of_gemm = OperandSpec(fprop, None)
            return [(self.x(), of_gemm, 1), (self.weight, of_gemm._replace(weight=True), 1)]
        assert self.g is not None
        if gemm is Gemm.DGRAD:
            return [(self.g, OperandSpec(dgrad, None), 1), (self.weight, OperandSpec(None, dgrad, weight=True), 0)]
        return [(self.g, OperandSpec(None, wgrad), 0), (self.x(), OperandSpec(None, wgrad), 0)]


def _normalized(module: Any, x: Tensor, *, exact: bool = False) -> Tensor:
    from snip_megatron.megatron.compat.transformer_engine import normalized  # which needs Transformer Engine

    return normalized(module, x, exact=exact)


def _norm_gradient(module: Any, x: Tensor, d: Tensor) -> Tensor:
    """Return the gradient of a norm's input x, from that of its result, d [T, K]."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        y = _normalized(module, leaf)
        (gradient,) = torch.autograd.grad(y, leaf, d.view(y.shape).to(y.dtype))
    return matrix(gradient)

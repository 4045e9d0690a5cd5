"""A job of Megatron's own FP8 or FP4 for ``--snip-blame``: its recipe, and Transformer Engine's linears, watched.

Transformer Engine multiplies inside its modules. What goes in and comes out is compared: the input and output of a
module, their gradients, and ``main_grad``. Sums over tensor parallel ranks inside a module are computed here by other
collectives, and a norm inside it by the functions that SNIP's own linears use.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from snip_megatron.layers.autograd import LinearCall
from snip_megatron.layers.context import LinearHandle, StepContext
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.megatron.compat.megatron_precision import delayed_state, shared_amax
from snip_megatron.numerics.products.backend import GemmBackend, matrix
from snip_megatron.numerics.products.host_recipe import HostRecipe
from snip_megatron.numerics.quantize.operands import OperandSpec
from snip_megatron.precision import Format, Formats, Gemm, LinearId, PrecisionMap, option_id
from snip_megatron.runtime.blame_passes import Job
from snip_megatron.runtime.exact_products import Product, Watcher, of_ranks
from snip_megatron.runtime.recipe_numerics import RecipeNumerics

BOUND = {4: 8.0, 8: 26.0, 16: 36.0}
"""Bits → least signal to noise ratio in dB. Norms inside a module are quantised without a rounding to bf16, fprop
accumulates in fewer bits than FP32 on Hopper, and in four bits gradients are rounded with other draws."""

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
    watch = partial(_watched, registry, recipe, keeps_weights=keeps_weights)
    return Job("megatron", description, formats, numerics, watch, BOUND)


class _Histories:
    """The histories of delayed scaling as they were when training would have begun."""

    def __init__(self, recipe: HostRecipe, registry: LinearRegistry) -> None:
        self._recipe = recipe
        self._saved: dict[tuple[int, int, str], State] = {}
        self._modules = _by_module(registry)
        for module, handles in self._modules:
            for expert in range(len(handles)):
                for operand in ("x", "w", "g"):
                    if (state := delayed_state(module, expert, operand)) is not None:
                        self._saved[id(module), expert, operand] = state[0].clone(), state[1].clone()

    def of(self, handle: LinearHandle, expert: int, operand: str) -> State:
        """Return the history and the scale with which the step begins: those of a new run if none were loaded."""
        saved = self._saved.get((id(handle.module), expert, operand))
        device = handle.weight.device
        return saved or (torch.zeros(self._recipe.history, device=device), torch.ones((), device=device))

    def restore(self) -> None:
        """Let Transformer Engine begin with them again."""
        for module, handles in self._modules:
            for expert in range(len(handles)):
                for operand in ("x", "w", "g"):
                    if (state := delayed_state(module, expert, operand)) is not None:
                        for target, source in zip(state, self.of(handles[0], expert, operand), strict=True):
                            target.copy_(source)


def _by_module(registry: LinearRegistry) -> list[tuple[Any, list[LinearHandle]]]:
    """Return every module with its linears, which are several only where one module has all experts."""
    modules: dict[int, tuple[Any, list[LinearHandle]]] = {}
    for handle in registry:
        modules.setdefault(id(handle.module), (handle.module, []))[1].append(handle)
    return list(modules.values())


# -- what goes in and comes out ------------------------------------------------------------------------------------
@contextmanager
def _watched(
    registry: LinearRegistry, recipe: HostRecipe, context: StepContext, watcher: Watcher, *, keeps_weights: bool
) -> Iterator[None]:
    with ExitStack() as stack:
        for module, handles in _by_module(registry):
            watch = _ModuleWatch(module, handles, recipe, watcher, keeps_weights=keeps_weights)
            hooks: list[Any] = [
                module.register_forward_pre_hook(watch.before),
                module.register_forward_hook(watch.after),
            ]
            for index, handle in enumerate(handles):
                weight: Any = handle.weight
                hooks.append(weight.register_hook(partial(watch.on_weight_gradient, index)))
            for hook in hooks:
                stack.callback(hook.remove)
        yield


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


class _ModuleWatch:
    """Watches one module of Transformer Engine."""

    def __init__(
        self,
        module: Any,
        handles: Sequence[LinearHandle],
        recipe: HostRecipe,
        watcher: Watcher,
        *,
        keeps_weights: bool,
    ) -> None:
        self.module, self.handles, self.recipe, self.watcher = module, handles, recipe, watcher
        self._keeps_weights = keeps_weights
        self._call: _Call | None = None
        self._weight_scales: list[Tensor | None] | None = None
        self._of_recomputed: deque[list[Tensor | None]] = deque()
        self.running: _Call | None = None

    def before(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        x, *others = args
        if not isinstance(x, Tensor):
            self._call = None
            return None
        call = self._call = _Call(self, x, others[0] if others and len(self.handles) > 1 else None)
        if not (torch.is_grad_enabled() and x.requires_grad):
            return None
        return _Tap.apply(x, call.on_input_gradient), *others  # type: ignore[no-untyped-call]

    def after(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        call, self._call = self._call, None
        if call is None:
            return output
        y, *others = output
        call.finish_forward(y)
        if torch.is_grad_enabled() and y.requires_grad:
            y = _Tap.apply(y, call.on_output_gradient)  # type: ignore[no-untyped-call]
        return (y, *others)

    def on_weight_gradient(self, index: int, gradient: Tensor) -> None:
        """Compare the gradient that autograd gets for a weight, unless the module has added it to ``main_grad``."""
        if self.running is not None and not self.accumulates:
            self.running.report_wgrad(index, gradient, None)

    @property
    def accumulates(self) -> bool:
        """Whether wgrad is added to ``main_grad`` inside the module."""
        return bool(getattr(self.module, "fuse_wgrad_accumulation", False))

    def scales(self, operand: str) -> list[Tensor | None]:
        """Return the scales of an operand that the latest forward, or the next backward, quantises with."""
        if self.recipe.name != "delayed":
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
        self.products: list[_TeProduct] = []

    def finish_forward(self, y: Tensor) -> None:
        """Compare the result of fprop."""
        watch = self.watch
        handles, module = watch.handles, watch.module
        x_scales, w_scales = watch.forward_scales()
        x = _normalized(module, self.input) if hasattr(module, "layer_norm_weight") else self.input
        for index, (handle, part) in enumerate(zip(handles, self._parts(x), strict=True)):
            scales = {"x": x_scales[index], "w": w_scales[index]}
            self.products.append(_TeProduct(handle, part, watch.watcher.formats_of(handle), watch.recipe, scales))
        for index, (product, result) in enumerate(zip(self.products, self._parts(y), strict=True)):
            rows = matrix(result.detach())
            bias = self._bias(index)
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
        if self.watch.accumulates:
            for index, (handle, before) in enumerate(zip(self.watch.handles, self.before, strict=True)):
                if before is not None:
                    self.report_wgrad(index, handle.weight.main_grad, before)  # type: ignore[attr-defined]
        for product, part in zip(self.products, self._parts(d), strict=True):
            self.watch.watcher.on_backward(product, matrix(part))

    def report_wgrad(self, index: int, result: Tensor, before: Tensor | None) -> None:
        """Compare ∇W of one linear."""
        if self.products[index].g is not None:
            self._report(self.products[index], Gemm.WGRAD, result, before)

    def _report(self, product: _TeProduct, gemm: Gemm, result: Tensor, before: Tensor | None = None) -> None:
        self.watch.watcher.on_result(product, gemm, result.detach(), before, "transformer_engine")

    def _parts(self, x: Tensor) -> Sequence[Tensor]:
        """Return the rows of each expert, or all of them."""
        return [x] if self.splits is None else torch.split(x, self.splits)

    def _bias(self, index: int) -> Tensor | None:
        """Return the bias that the module has added itself."""
        module = self.watch.module
        if not module.use_bias or not module.apply_bias or module.te_return_bias:
            return None
        bias: Tensor = getattr(module, "bias" if self.splits is None else f"bias{index}")
        return bias


class _TeProduct(Product):
    """A linear of Transformer Engine in one microbatch.

    Attributes:
        scales: the scales of "x", "w" and "g" under delayed scaling.
        through: what lies between dgrad and the gradient of the module's input. None if nothing does.
    """

    through: Callable[[Tensor], Tensor] | None = None

    def __init__(
        self, handle: LinearHandle, x: Tensor, formats: Formats, recipe: HostRecipe, scales: dict[str, Tensor | None]
    ) -> None:
        mode = getattr(handle.module, "parallel_mode", None) if handle.tp_size > 1 else None
        shards = mode is not None and bool(handle.module.sequence_parallel)
        call = LinearCall(
            handle, sequence_parallel=shards and mode == "column", tp_group=handle.tp_group,
            reduce_scatter=shards and mode == "row",
        )  # fmt: skip
        super().__init__(call, x, handle.weight, formats)
        self.recipe, self.scales = recipe, scales
        self.summed, self._sums = None, {"row": Gemm.FPROP, "column": Gemm.DGRAD}.get(mode or "")
        self._shards = shards

    def multiplied(
        self, gemm: Gemm, operands: Sequence[tuple[Tensor, OperandSpec, int]], numerics: GemmBackend
    ) -> Tensor:
        """See the base class. It is what the module returns: the sum over ranks, and this rank's tokens of it."""
        names = {Gemm.FPROP: "xw", Gemm.DGRAD: "gw", Gemm.WGRAD: "gx"}[gemm]
        left, right = (self._numbers(name, *each) for name, each in zip(names, operands, strict=True))
        product = left.t() @ right if gemm is Gemm.WGRAD else left @ (right.t() if gemm is Gemm.FPROP else right)
        if gemm is self._sums:
            parts = of_ranks(product, self.handle.tp_group)
            product = torch.stack(parts).sum(0)
            if self._shards:
                product = product.chunk(len(parts))[dist.get_rank(self.handle.tp_group)]
        return self.through(product) if gemm is Gemm.DGRAD and self.through is not None else product

    def _numbers(self, name: str, x: Tensor, spec: OperandSpec, axis: int) -> Tensor:
        if spec.formats[1 - axis] is Format.BF16:
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


def _normalized(module: Any, x: Tensor) -> Tensor:
    from snip_megatron.megatron.compat.transformer_engine import normalized  # which needs Transformer Engine

    with torch.no_grad():
        return normalized(module, x)


def _norm_gradient(module: Any, x: Tensor, d: Tensor) -> Tensor:
    """Return the gradient of a norm's input x, from that of its result, d [T, K]."""
    from snip_megatron.megatron.compat.transformer_engine import normalized

    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        y = normalized(module, leaf)
        (gradient,) = torch.autograd.grad(y, leaf, d.view(y.shape).to(y.dtype))
    return matrix(gradient)

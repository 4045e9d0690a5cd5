"""One MLP of experts, and a step of it by each contender of ``benchmarks.layers.experts``."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from snip_megatron.layers.context import LinearHandle, LinearState, StepContext
from snip_megatron.layers.grouped import GroupedCall, grouped_call, grouped_product, pad, unpad
from snip_megatron.layers.swiglu import fused_experts, may_fuse_experts
from snip_megatron.numerics.products.deepgemm import grouped_library, why_not
from snip_megatron.numerics.products.grouped import DeviceRows, group_rows
from snip_megatron.numerics.products.grouped_hopper import grouped_mm
from snip_megatron.numerics.products.selection import select_backend
from snip_megatron.precision import Format, LinearId
from snip_megatron.timing.measure import uneven_splits

MICROBATCHES = 4
Formats = tuple[Format, Format, Format]
Map = tuple[Formats, Formats]
"""The formats of fc1 and of fc2."""


def as_in_training(weight: torch.nn.Parameter, gradient: Tensor) -> torch.nn.Parameter:
    """Give a weight what Megatron's DDP gives it: FP32 ``main_grad``, and a hook that forgets what autograd gets in its
    place. Otherwise autograd adds up these gradients without meaning, microbatch after microbatch.
    """
    weight.main_grad, weight.grad_added_to_main_grad = gradient, False  # type: ignore[attr-defined]
    weight.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    return weight


class Experts(torch.nn.Module):
    """One linear of all experts, with weights and gradients that follow each other in memory."""

    def __init__(self, count: int, n: int, k: int, context: StepContext, device: str) -> None:
        super().__init__()
        self.memory = torch.randn(count, n, k, device=device, dtype=torch.bfloat16).mul_(k**-0.5)
        self.gradients = torch.zeros(count, n, k, device=device)
        for e, (weight, gradient) in enumerate(zip(self.memory, self.gradients, strict=True)):
            self.register_parameter(f"weight{e}", as_in_training(torch.nn.Parameter(weight), gradient))
        self.weights = list(self.parameters())
        self.handles = [
            LinearHandle(
                id=LinearId("decoder", 0, "mlp.experts.linear_fc1"), parallel="column", n=n, k=k, stage=0, tp_rank=0,
                tp_size=1, out_features=torch.arange(n), in_features=torch.arange(k), context=context, module=self,
                expert=e, parameter=f"weight{e}", state=LinearState(),
            )
            for e in range(count)
        ]  # fmt: skip

    def forward(self, x: Tensor | None, splits: Sequence[int]) -> Tensor | GroupedCall:
        """As the linears of Megatron's experts: without x, the call."""
        if x is None:
            return grouped_call(self.handles, self.weights, on_wgrad_complete=lambda: None)
        return grouped_product(self.handles, self.weights, x, splits, on_wgrad_complete=lambda: None)


def swiglu(y: Tensor, probs: Tensor) -> Tensor:
    from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

    result: Tensor = weighted_bias_swiglu_impl(y, None, probs)
    return result


class Problem:
    """Rows of experts, weights and the gradient of the result, the same memory for all contenders.

    Args:
        shape: hidden size, size of an expert, experts, rows before padding.
        ragged: whether the MLP pads rows, and not the dispatcher.
        library: ``--snip-settings gemm_library``.

    Attributes:
        microbatches: microbatches of a step.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], device: str, *, ragged: bool = False, library: str = "auto"
    ) -> None:
        hidden, ffn, experts, rows = shape
        self.rows, self.splits = rows, uneven_splits(experts, rows, 1 if ragged else 128)
        self.microbatches = MICROBATCHES
        backend = select_backend("hopper" if device == "cuda" else "reference", library=library).backend
        context, count = StepContext(seed=1, backend=backend), sum(self.splits)
        self.fc1 = Experts(experts, 2 * ffn, hidden, context, device)
        self.fc2 = Experts(experts, hidden, ffn, context, device)
        self.context = context
        self.x = torch.randn(count, hidden, device=device).bfloat16().requires_grad_()
        self.g = torch.randn(count, hidden, device=device).bfloat16()
        self.probs = torch.rand(count, 1, device=device)

    @property
    def results(self) -> dict[str, Tensor]:
        assert self.x.grad is not None
        return {"dx": self.x.grad, "dw1": self.fc1.gradients, "dw2": self.fc2.gradients}

    def weight(self, name: str) -> tuple[int, int]:
        """Return N and K of a linear."""
        _, n, k = getattr(self, name).memory.shape
        return n, k

    def saved_inputs(self, step: Callable[[], Tensor]) -> int:
        """Return the bytes of X of both linears that a microbatch saves: of all that it saves but weights, without Y of
        fc1 and the probabilities, which SwiGLU saves.
        """
        bytes_at = {}

        def noted(saved: Tensor) -> Tensor:
            bytes_at[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
            return saved

        self.microbatches = 1
        with torch.autograd.graph.saved_tensors_hooks(noted, lambda saved: saved):
            step()
        self.microbatches = MICROBATCHES
        weights = [linear.memory.data_ptr() for linear in (self.fc1, self.fc2)]
        of_swiglu = self.probs.nbytes + self.x.shape[0] * self.fc1.memory[0].shape[0] * self.x.itemsize
        return sum(size for address, size in bytes_at.items() if address not in weights) - of_swiglu

    def clear(self) -> None:
        self.x.grad = None
        self.fc1.gradients.zero_()
        self.fc2.gradients.zero_()


def snip_step(problem: Problem, formats: Map, *, on_device: bool = False) -> Callable[[], Tensor]:
    """Return a step of one contender of this project. It returns the last result.

    With ``on_device`` the host does not know the experts' numbers of rows, and every microbatch makes the table of
    them. The map's kernels must take such rows.
    """
    fc1, fc2, splits = problem.fc1, problem.fc2, problem.splits
    counts, padded = torch.tensor(splits, device=problem.x.device), group_rows(tuple(splits), problem.x.device)

    def step() -> Tensor:
        problem.context.map_is_quantized = True
        for linear, chosen in zip((fc1, fc2), formats, strict=True):
            linear.handles[0].state.formats = chosen
            linear.handles[0].state.weights.clear()
        for _ in range(problem.microbatches):
            problem.x.grad = None
            if on_device or may_fuse_experts(fc1.handles[0], fc2.handles[0]):
                rows = DeviceRows(counts, len(problem.x), backwards=False) if on_device else padded
                y = fused_experts(problem.x, problem.probs, rows, fc1(None, splits), fc2(None, splits))
            else:
                hidden, probs = pad(problem.x, padded), pad(problem.probs, padded)
                y = unpad(fc2(swiglu(fc1(hidden, padded), probs), padded), padded)
            y.backward(problem.g)
        return y

    return step


class TorchLibrary:
    """bf16 products of all experts by torch. Its wgrad is bf16, and then added."""

    def __init__(self, splits: Sequence[int], device: str) -> None:
        self.rows = group_rows(tuple(splits), torch.device(device))

    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        return grouped_mm(x, w.transpose(1, 2), offs=self.rows.map.table[3])

    def dgrad(self, g: Tensor, w: Tensor) -> Tensor:
        return grouped_mm(g, w, offs=self.rows.map.table[3])

    def wgrad(self, g: Tensor, x: Tensor, out: Tensor) -> None:
        out.add_(grouped_mm(g.t(), x, offs=self.rows.map.table[3]))


class DeepGemmLibrary(TorchLibrary):
    """The same by DeepGEMM, whose wgrad is added in FP32."""

    def __init__(self, splits: Sequence[int], device: str) -> None:
        super().__init__(splits, device)
        self.counts = list(splits), torch.tensor(splits, dtype=torch.int32, device=device)

    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        out = x.new_empty(len(x), w.shape[1])
        grouped_library().m_grouped_bf16_gemm_nt_contiguous(x, w, out, self.rows.map.experts)
        return out

    def dgrad(self, g: Tensor, w: Tensor) -> Tensor:
        out = g.new_empty(len(g), w.shape[2])
        grouped_library().m_grouped_bf16_gemm_nn_contiguous(g, w, out, self.rows.map.experts)
        return out

    def wgrad(self, g: Tensor, x: Tensor, out: Tensor) -> None:
        grouped_library().k_grouped_bf16_gemm_tn_contiguous(g, x, out, *self.counts, out)


class _Groups(torch.autograd.Function):
    """Products of all experts in bf16 by one library."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: Experts, library: TorchLibrary) -> Tensor:
        ctx.save_for_backward(x)
        ctx.linear, ctx.library = linear, library
        return library.fprop(x, linear.memory)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (x,), linear, g = ctx.saved_tensors, ctx.linear, grad_outputs[0].contiguous()
        ctx.library.wgrad(g, x, linear.gradients)
        return ctx.library.dgrad(g, linear.memory), None, None


def libraries(problem: Problem, device: str) -> dict[str, TorchLibrary]:
    """Return the libraries of this machine by name."""
    libraries = {"torch": TorchLibrary(problem.splits, device)}
    has_deepgemm = device == "cuda" and why_not() is None
    return libraries | ({"deepgemm": DeepGemmLibrary(problem.splits, device)} if has_deepgemm else {})


def library_step(problem: Problem, library: TorchLibrary) -> Callable[[], Tensor]:
    """Return the step of a library in bf16."""

    def step() -> Tensor:
        for _ in range(problem.microbatches):
            problem.x.grad = None
            y = _Groups.apply(problem.x, problem.fc1, library)  # type: ignore[no-untyped-call]
            y = _Groups.apply(swiglu(y, problem.probs), problem.fc2, library)  # type: ignore[no-untyped-call]
            y.backward(problem.g)
        return y  # type: ignore[no-any-return]

    return step


def makers_of_rivals(problem: Problem) -> dict[str, Callable[[], Callable[[], Tensor]]]:
    """Return what makes the steps of Transformer Engine and torchao, as far as they are installed."""
    torchao = all(importlib.util.find_spec(name) is not None for name in ("torchao", "deep_gemm"))
    return _te_makers(problem) | ({"torchao_block": partial(_torchao_step, problem)} if torchao else {})


def _te_makers(problem: Problem) -> dict[str, Callable[[], Callable[[], Tensor]]]:
    """Return what makes Transformer Engine's steps by name; nothing if it is not installed."""
    try:
        from transformer_engine.common import recipe
    except ImportError:
        return {}
    recipes = {"bf16": None, "current": recipe.Float8CurrentScaling(), "block": recipe.Float8BlockScaling()}
    by_expert = partial(_te_step, problem, problem.splits)
    makers = {f"te_{name}": partial(by_expert, each) for name, each in recipes.items()}
    makers["te_cutlass_bf16"] = lambda: _by_cutlass(by_expert(None))
    on_device = partial(_te_step, problem, torch.tensor(problem.splits, device="cuda"))
    os.environ["NVTE_GROUPED_LINEAR_SINGLE_PARAM"] = "1"  # without it there is no single weight
    for name, each in recipes.items():
        if _takes_counts_on_device(each):
            makers[f"te_grouped_{name}"] = partial(on_device, each, use_grouped_tensor=True)
            makers[f"te_single_{name}"] = partial(on_device, each, use_grouped_tensor=True, single_grouped_weight=True)
    return makers


def _takes_counts_on_device(recipe: Any) -> bool:
    """Return whether Transformer Engine and the cuBLASLt that is loaded have a grouped-tensor path for a recipe."""
    try:
        from transformer_engine.pytorch.module.grouped_linear import is_module_grouped_tensor_path_supported
    except ImportError:  # before 2.20
        return False
    supported: bool = is_module_grouped_tensor_path_supported(recipe, torch.bfloat16)
    return supported


def _te_linear(linear: Experts, **options: bool) -> Any:
    """Return Transformer Engine's linear of all experts with the weights and gradients of ``linear``."""
    import transformer_engine.pytorch as te

    count, n, k = linear.memory.shape
    module = te.GroupedLinear(
        count, k, n, bias=False, params_dtype=torch.bfloat16, device="cuda", fuse_wgrad_accumulation=True, **options
    )
    if "single_grouped_weight" in options:
        module.weight.rowwise_data.view_as(linear.memory).copy_(linear.memory)
        parameters = [(module.weight, linear.gradients)]
    else:
        parameters = [(getattr(module, f"weight{e}"), gradient) for e, gradient in enumerate(linear.gradients)]
        for (weight, _), values in zip(parameters, linear.memory, strict=True):
            weight.data = values
    for weight, gradient in parameters:
        weight.overwrite_main_grad = False
        as_in_training(weight, gradient)
    return module


def _te_step(problem: Problem, splits: Sequence[int] | Tensor, recipe: Any, **options: bool) -> Callable[[], Tensor]:
    """Return the step of two linears of Transformer Engine under a recipe; None is bf16."""
    import transformer_engine.pytorch as te

    fc1, fc2 = (_te_linear(linear, **options) for linear in (problem.fc1, problem.fc2))

    def step() -> Tensor:
        for microbatch in range(problem.microbatches):
            problem.x.grad = None
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = fc1(problem.x, splits, is_first_microbatch=microbatch == 0)
                y = fc2(swiglu(y, problem.probs), splits, is_first_microbatch=microbatch == 0)
            y.backward(problem.g)
        return y  # type: ignore[no-any-return]

    return step


def _by_cutlass(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a step of Transformer Engine in bf16 with its products by CUTLASS, where these take the operands."""

    def by_cutlass() -> Tensor:
        os.environ["NVTE_USE_CUTLASS_GROUPED_GEMM"] = "1"
        try:
            return step()
        finally:
            del os.environ["NVTE_USE_CUTLASS_GROUPED_GEMM"]

    return by_cutlass


def _torchao_step(problem: Problem) -> Callable[[], Tensor]:
    """Return torchao's step by DeepGEMM in tiles.

    It quantises weights in every forward and backward, and its wgrad is bf16, and then added.
    """
    from torchao.prototype.moe_training.blockwise_fp8 import grouped_mm

    product: Any = grouped_mm._to_fp8_blockwise_then_scaled_grouped_mm
    bounds = torch.tensor(problem.splits, device="cuda").cumsum(0).int()
    linears = problem.fc1, problem.fc2
    weights = [linear.memory.detach().requires_grad_() for linear in linears]

    def step() -> Tensor:
        for _ in range(problem.microbatches):
            problem.x.grad = None
            y = product(problem.x, weights[0].transpose(1, 2), bounds, pad_token_groups_for_grouped_mm=False)
            y = swiglu(y, problem.probs)
            y = product(y, weights[1].transpose(1, 2), bounds, pad_token_groups_for_grouped_mm=False)
            y.backward(problem.g)
            for weight, linear in zip(weights, linears, strict=True):
                linear.gradients.add_(weight.grad)
                weight.grad = None
        return y  # type: ignore[no-any-return]

    return step

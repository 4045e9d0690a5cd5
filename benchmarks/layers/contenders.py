"""One linear, forward and backward, with four microbatches a step: SNIP's layer, plain bf16, Transformer Engine.

All contenders accumulate the weight gradient into an FP32 ``main_grad``. None accumulates x.grad: it is dropped before
every backward, so that autograd passes the tensor on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from snip_megatron.layers.autograd import LinearCall, QuantizedLinear
from snip_megatron.layers.context import LinearHandle, LinearState, StepContext
from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.products.cublaslt import cublaslt
from snip_megatron.precision import Format, LinearId

MICROBATCHES = 4


@dataclass
class Problem:
    """X [M, K] that requires gradients, weight [N, K] with ``main_grad``, G [M, N], in bf16."""

    x: Tensor
    weight: torch.nn.Parameter
    g: Tensor

    @classmethod
    def draw(cls, m: int, n: int, k: int) -> Problem:
        generator = torch.Generator(device="cuda").manual_seed(m + n + k)
        options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
        x, g = torch.randn(m, k, **options), torch.randn(m, n, **options).mul_(1e-3)
        weight = torch.nn.Parameter(torch.randn(n, k, **options).mul_(k**-0.5))
        weight.main_grad = torch.zeros(n, k, device="cuda")  # type: ignore[attr-defined]
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        return cls(x.requires_grad_(), weight, g)


class Contender(Protocol):
    """One way to run the linear. ``step`` runs the microbatches of a step; ``once`` runs one of them and returns Y."""

    def step(self) -> None: ...

    def once(self) -> Tensor: ...


class _Linear:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def forward(self, microbatch: int) -> Tensor:
        raise NotImplementedError

    def microbatch(self, index: int) -> Tensor:
        self.problem.x.grad = self.problem.weight.grad = None
        y = self.forward(index)
        y.backward(self.problem.g)
        return y

    def step(self) -> None:
        for index in range(MICROBATCHES):
            self.microbatch(index)

    def once(self) -> Tensor:
        return self.microbatch(0).detach()


class _Holder(torch.nn.Module):
    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class Snip(_Linear):
    """SNIP's autograd function, as a converted linear runs it."""

    def __init__(self, problem: Problem, backend: GemmBackend, formats: tuple[Format, Format, Format]) -> None:
        super().__init__(problem)
        n, k = problem.weight.shape
        self.handle = LinearHandle(
            id=LinearId("decoder", 0, "mlp.linear_fc1"), parallel="column", n=n, k=k, stage=0, tp_rank=0, tp_size=1,
            out_features=torch.arange(n), in_features=torch.arange(k), context=StepContext(backend=backend),
            module=_Holder(problem.weight), state=LinearState(formats=formats),
        )  # fmt: skip
        self.call = LinearCall(self.handle)

    def step(self) -> None:
        self.handle.state.backwards = 0
        self.handle.state.weights.clear()
        super().step()

    def forward(self, microbatch: int) -> Tensor:
        problem = self.problem
        y: Tensor = QuantizedLinear.apply(problem.x, problem.weight, None, self.call)  # type: ignore[no-untyped-call]
        return y


class _Plain(torch.autograd.Function):
    """A bf16 linear whose backward passes ∇W to ``accumulate(g, x, main_grad)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, accumulate: Callable[[Tensor, Tensor, Tensor], object]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.accumulate, ctx.main_grad = accumulate, weight.main_grad  # type: ignore[attr-defined]
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        d = gradients[0] @ weight
        ctx.accumulate(gradients[0], x, ctx.main_grad)
        return d, None, None


class Bf16(_Linear):
    """torch's bf16 GEMMs, with the weight gradient added by ``accumulate``."""

    def __init__(self, problem: Problem, accumulate: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        super().__init__(problem)
        self.accumulate = accumulate

    def forward(self, microbatch: int) -> Tensor:
        y: Tensor = _Plain.apply(self.problem.x, self.problem.weight, self.accumulate)  # type: ignore[no-untyped-call]
        return y


class TransformerEngine(_Linear):
    """te.Linear with fused accumulation. Its quantised weight is kept over the microbatches of a step."""

    def __init__(self, problem: Problem, recipe: Any | None) -> None:
        import transformer_engine.pytorch as te

        super().__init__(problem)
        n, k = problem.weight.shape
        self.linear = te.Linear(
            k, n, bias=False, params_dtype=torch.bfloat16, device="cuda", fuse_wgrad_accumulation=True
        )
        self.linear.weight = problem.weight
        self.autocast = getattr(te, "autocast", None)
        self.recipe = recipe

    def forward(self, microbatch: int) -> Tensor:
        context: Any = contextlib.nullcontext()
        if self.recipe is not None:
            import transformer_engine.pytorch as te

            context = (
                te.autocast(enabled=True, recipe=self.recipe)
                if self.autocast is not None
                else te.fp8_autocast(enabled=True, fp8_recipe=self.recipe)
            )
        with context:
            y: Tensor = self.linear(self.problem.x, is_first_microbatch=microbatch == 0)
        return y


# -- who takes part ------------------------------------------------------------------------------------------------
def _fused(g: Tensor, x: Tensor, out: Tensor) -> None:
    library = cublaslt()
    if library is None or library.multiply(g, x, out.dtype, transposed=(True, False), out=out, add=True) is None:
        raise RuntimeError("cuBLASLt has no kernel that accumulates")


def bf16_contenders(problem: Problem) -> dict[str, Contender]:
    """Return every way to compute the result in bf16. Speedups are relative to the fastest one."""
    contenders: dict[str, Contender] = {
        "bf16 matmul + add": Bf16(problem, lambda g, x, out: out.add_(g.t() @ x)),
        "bf16 matmul to FP32 + add": Bf16(
            problem, lambda g, x, out: out.add_(torch.mm(g.t(), x, out_dtype=torch.float32))
        ),
        "bf16 cuBLASLt fused accumulation": Bf16(problem, _fused),
    }
    if has_transformer_engine():
        contenders["bf16 Transformer Engine fused accumulation"] = TransformerEngine(problem, None)
    return contenders


def transformer_engine_contenders(problem: Problem) -> dict[str, Contender]:
    """Return ``te <format>`` → Transformer Engine's recipe of the same scaling; empty without Transformer Engine."""
    if not has_transformer_engine():
        return {}
    from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling

    return {
        "te fp8": TransformerEngine(problem, Float8BlockScaling()),
        "te fp8_tensor": TransformerEngine(problem, Float8CurrentScaling()),
    }


def has_transformer_engine() -> bool:
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError:
        return False
    return True

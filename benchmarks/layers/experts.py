"""The MLP of experts on one Hopper GPU: fc1, SwiGLU × probabilities, fc2, forward, backward and quantisation.

    python -m benchmarks.layers.experts --out results/layers/F.json [--shapes NAME ...] [--commit SHA]
    python -m benchmarks.layers.experts --cpu        # the reference at a tiny size, on any machine

Rows are uneven over experts (.7 to 1.3 of the mean) and multiples of 128, as a dispatcher that pads hands them over;
``--ragged`` leaves the padding to the MLP. All contenders accumulate weight gradients into FP32. Weights are quantised
once for four microbatches. Milliseconds of a microbatch, medians of interleaved rounds:

- ``bf16_deepgemm``, ``bf16_torch`` (``torch._grouped_mm``): one launch for each product; ``bf16``: the faster of them.
- ``te_bf16``, ``te_current``, ``te_block``: Transformer Engine's grouped linears.
- ``snip_fp8``, ``snip_fp8_tensor``: all GEMMs in one format. ``snip``: the fastest of the maps by GEMM that ``maps``
  names, chosen by a measurement of its own. ``snip_unfused``: the same map without fusion of SwiGLU.

``errors`` has the relative errors of Y, ∂L/∂X and the weights' gradients to products of FP32 matrices.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.common import header, interleaved, refuse_without_cuda, write
from snip_megatron.gemm.selection import select_backend
from snip_megatron.layers.context import LinearHandle, LinearState, StepContext
from snip_megatron.layers.grouped import grouped_product
from snip_megatron.layers.padding import PaddedSplits
from snip_megatron.layers.swiglu import may_fuse_experts, weighted_swiglu
from snip_megatron.precision import Format, LinearId

MICROBATCHES = 4
SHAPES = {  # hidden, ffn, experts on this GPU, rows
    "deepseek-v3 E4": (7168, 2048, 4, 32768),
    "qwen3-235b E8": (4096, 1536, 8, 32768),
    "qwen3-30b E16": (2048, 768, 16, 32768),
    "qwen3-30b E128": (2048, 768, 128, 65536),
}
TINY = {"tiny E2": (128, 128, 2, 256)}
B, E, F, T = Format.BF16, Format.FP8, Format.FP4, Format.FP8_TENSOR
Formats = tuple[Format, Format, Format]
UNIFORM: dict[str, Formats] = {"bf16_deepgemm": (B, B, B), "snip_fp8": (E, E, E), "snip_fp8_tensor": (T, T, T)}
MAPS: dict[str, Formats] = {"fp8 fp8 bf16": (E, E, B), "fp8 bf16 bf16": (E, B, B), "fp4 fp8 bf16": (F, E, B)}


class Experts(torch.nn.Module):
    """One linear of all experts, with weights and gradients that follow each other in memory."""

    def __init__(self, count: int, n: int, k: int, context: StepContext, device: str) -> None:
        super().__init__()
        self.memory = torch.randn(count, n, k, device=device, dtype=torch.bfloat16).mul_(k**-0.5)
        self.gradients = torch.zeros(count, n, k, device=device)
        for e, (weight, gradient) in enumerate(zip(self.memory, self.gradients, strict=True)):
            parameter = torch.nn.Parameter(weight)
            parameter.main_grad, parameter.grad_added_to_main_grad = gradient, False  # type: ignore[attr-defined]
            self.register_parameter(f"weight{e}", parameter)
        self.handles = [
            LinearHandle(
                id=LinearId("decoder", 0, "mlp.experts.linear_fc1"), parallel="column", n=n, k=k, stage=0, tp_rank=0,
                tp_size=1, out_features=torch.arange(n), in_features=torch.arange(k), context=context, module=self,
                expert=e, parameter=f"weight{e}", state=LinearState(),
            )
            for e in range(count)
        ]  # fmt: skip

    def forward(self, x: Tensor, splits: Sequence[int]) -> Tensor:
        return grouped_product(self.handles, list(self.parameters()), x, splits)


def swiglu(y: Tensor, probs: Tensor) -> Tensor:
    from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

    found: Tensor = weighted_bias_swiglu_impl(y, None, probs)
    return found


class Problem:
    """Rows of experts, weights and the gradient of the result, the same memory for all contenders."""

    def __init__(self, shape: tuple[int, int, int, int], device: str, *, ragged: bool) -> None:
        hidden, ffn, experts, rows = shape
        shares = [random.Random(e).uniform(0.7, 1.3) for e in range(experts)]
        unit = 1 if ragged else 128
        self.splits = [max(1, round(rows * share / sum(shares) / unit)) * unit for share in shares]
        backend = select_backend("hopper" if device == "cuda" else "reference").backend
        context, count = StepContext(seed=1, backend=backend), sum(self.splits)
        self.fc1 = Experts(experts, 2 * ffn, hidden, context, device)
        self.fc2 = Experts(experts, hidden, ffn, context, device)
        self.x = torch.randn(count, hidden, device=device).bfloat16().requires_grad_()
        self.g = torch.randn(count, hidden, device=device).bfloat16()
        self.probs = torch.rand(count, 1, device=device)

    @property
    def results(self) -> dict[str, Tensor]:
        assert self.x.grad is not None
        return {"dx": self.x.grad, "dw1": self.fc1.gradients, "dw2": self.fc2.gradients}

    def clear(self) -> None:
        self.x.grad = None
        self.fc1.gradients.zero_()
        self.fc2.gradients.zero_()


def snip_step(problem: Problem, formats: Formats, *, fuses: bool = True) -> Callable[[], Tensor]:
    """Return a step of one contender of this project. It returns the last result."""
    fc1, fc2, splits = problem.fc1, problem.fc2, problem.splits

    def step() -> Tensor:
        for linear in (fc1, fc2):
            linear.handles[0].state.formats = formats
            linear.handles[0].state.weights.clear()
        for _ in range(MICROBATCHES):
            problem.x.grad = None
            rows: Sequence[int] = splits
            hidden, probs = problem.x, problem.probs
            if any(count % 128 for count in splits):
                rows = PaddedSplits(splits, 128, backwards=False, device=hidden.device)
                hidden, probs = rows.pad(hidden), rows.pad(probs)
            y = fc1(hidden, rows)
            if fuses and may_fuse_experts(fc1.handles[0], fc2.handles[0]):
                x = weighted_swiglu(y, probs, rows, fc1.handles[0], fc2.handles[0])
            else:
                x = swiglu(y, probs)
            y = fc2(x, rows)
            y = rows.unpad(y) if isinstance(rows, PaddedSplits) else y
            y.backward(problem.g)
        return y

    return step


class _TorchGroups(torch.autograd.Function):
    """Products of all experts by ``torch._grouped_mm``, whose bf16 wgrad is added to FP32 gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: Experts, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends)
        ctx.linear = linear
        found: Tensor = torch._grouped_mm(x, linear.memory.transpose(1, 2), offs=ends)
        return found

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (x, ends), linear, g = ctx.saved_tensors, ctx.linear, grad_outputs[0].contiguous()
        linear.gradients.add_(torch._grouped_mm(g.t(), x, offs=ends))
        return torch._grouped_mm(g, linear.memory, offs=ends), None, None


def torch_step(problem: Problem) -> Callable[[], Tensor]:
    """Return the step of ``torch._grouped_mm``."""
    ends = torch.tensor(problem.splits, device=problem.x.device).cumsum(0).to(torch.int32)

    def step() -> Tensor:
        for _ in range(MICROBATCHES):
            problem.x.grad = None
            y = _TorchGroups.apply(problem.x, problem.fc1, ends)  # type: ignore[no-untyped-call]
            y = _TorchGroups.apply(swiglu(y, problem.probs), problem.fc2, ends)  # type: ignore[no-untyped-call]
            y.backward(problem.g)
        return y  # type: ignore[no-any-return]

    return step


def te_steps(problem: Problem) -> dict[str, Callable[[], Tensor]]:
    """Return Transformer Engine's steps by name; none if it is not installed."""
    try:
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe
    except ImportError:
        return {}
    modules = []
    for own in (problem.fc1, problem.fc2):
        n, k = own.handles[0].weight.shape
        module = te.GroupedLinear(
            len(own.handles), k, n, bias=False, params_dtype=torch.bfloat16, device="cuda", fuse_wgrad_accumulation=True
        )
        for e, handle in enumerate(own.handles):
            weight = getattr(module, f"weight{e}")
            weight.data = handle.weight.data
            weight.main_grad, weight.overwrite_main_grad = handle.weight.main_grad, False
        modules.append(module)

    def step(chosen: Any) -> Tensor:
        for microbatch in range(MICROBATCHES):
            problem.x.grad = None
            with te.autocast(enabled=chosen is not None, recipe=chosen):
                y = modules[0](problem.x, problem.splits, is_first_microbatch=microbatch == 0)
                y = modules[1](swiglu(y, problem.probs), problem.splits, is_first_microbatch=microbatch == 0)
            y.backward(problem.g)
        return y  # type: ignore[no-any-return]

    recipes = {"te_bf16": None, "te_current": recipe.Float8CurrentScaling(), "te_block": recipe.Float8BlockScaling()}
    return {name: lambda chosen=chosen: step(chosen) for name, chosen in recipes.items()}  # type: ignore[misc]


def exact(problem: Problem) -> dict[str, Tensor]:
    """Return the result and all gradients of a step of FP32 matrices, expert by expert."""
    parts: dict[str, list[Tensor]] = {"y": [], "dx": [], "dw1": [], "dw2": []}
    rows = (t.detach().float().split(problem.splits) for t in (problem.x, problem.g, problem.probs))
    for x, g, probs, fc1, fc2 in zip(*rows, problem.fc1.memory, problem.fc2.memory, strict=True):
        leaves = [t.float().requires_grad_() for t in (x, fc1, fc2)]
        gate, up = (leaves[0] @ leaves[1].t()).chunk(2, -1)
        y = (functional.silu(gate) * up * probs) @ leaves[2].t()
        for name, found in zip(parts, (y.detach(), *torch.autograd.grad(y, leaves, g)), strict=True):
            parts[name].append(found if name in ("y", "dx") else MICROBATCHES * found)
    return {name: torch.cat(found) if name in ("y", "dx") else torch.stack(found) for name, found in parts.items()}


def errors(problem: Problem, step: Callable[[], Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the relative error of each result of a step."""
    problem.clear()
    found = {"y": step().detach()} | problem.results
    return {
        name: float(f"{float((found[name].float() - truth).norm() / truth.norm()):.2e}")
        for name, truth in expected.items()
    }


def milliseconds(calls: Mapping[str, Callable[[], object]], rounds: int, device: str) -> dict[str, float]:
    """Return the milliseconds of each call; on a CPU those of one."""
    if device == "cuda":
        return interleaved(calls, rounds)
    found = {}
    for name, call in calls.items():
        start = time.perf_counter()
        call()
        found[name] = 1e3 * (time.perf_counter() - start)
    return found


def measure(shape: tuple[int, int, int, int], rounds: int, device: str, *, ragged: bool) -> dict[str, Any]:
    """Return contender → milliseconds of a microbatch, their errors, and the map of ``snip``."""
    problem = Problem(shape, device, ragged=ragged)
    maps = {name: snip_step(problem, formats) for name, formats in MAPS.items()}
    tried = milliseconds(maps, max(2, rounds // 3), device)
    chosen = min(tried, key=lambda name: tried[name])
    calls = {name: snip_step(problem, formats) for name, formats in UNIFORM.items()}
    calls |= {"snip": maps[chosen], "snip_unfused": snip_step(problem, MAPS[chosen], fuses=False)}
    if not ragged:  # their rows must be multiples of some number
        calls |= {"bf16_torch": torch_step(problem)} | (te_steps(problem) if device == "cuda" else {})
    expected = exact(problem)
    wrong = {name: errors(problem, call, expected) for name, call in calls.items()}
    found = {name: round(ms / MICROBATCHES, 3) for name, ms in milliseconds(calls, rounds, device).items()}
    best = min(("bf16_deepgemm", "bf16_torch"), key=lambda name: found.get(name, float("inf")))
    return {"mlp": {"bf16": found[best], **found}, "errors": wrong, "map": chosen, "bf16": best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ragged", action="store_true", help="rows that are no multiples of 128")
    parser.add_argument("--cpu", action="store_true", help="the reference at a tiny size, which any machine runs")
    parser.add_argument("--commit")
    args = parser.parse_args()
    if args.cpu:
        torch.compiler.set_stance("force_eager")  # compiling Megatron's SwiGLU takes a minute
    else:
        refuse_without_cuda()
    device, shapes = ("cpu", TINY) if args.cpu else ("cuda", {name: SHAPES[name] for name in args.shapes})
    result: dict[str, Any] = header(args.commit) | {"ragged": args.ragged}
    result |= {"mlp": {}, "errors": {}, "map": {}, "bf16": {}}
    for name, shape in shapes.items():
        for key, found in measure(shape, args.rounds, device, ragged=args.ragged).items():
            result[key][name] = found
        times = result["mlp"][name]
        print(name, {contender: f"{ms:.2f} ms, {times['bf16'] / ms:.2f} x bf16" for contender, ms in times.items()})
        print(f"  map {result['map'][name]}, bf16 by {result['bf16'][name]}, errors {result['errors'][name]}")
        write(args.out, result)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

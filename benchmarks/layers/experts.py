"""The MLP of experts on one Hopper GPU: fc1, SwiGLU × probabilities, fc2, forward, backward and quantisation.

    python -m benchmarks.layers.experts --out results/layers/F.json [--shapes NAME ...] [--commit SHA]

Rows are uneven over experts (.7 to 1.3 of the mean) and multiples of 128, as a dispatcher that pads hands them over;
``--ragged`` leaves the padding to the MLP. All contenders accumulate weight gradients into FP32. Weights are quantised
once for four microbatches. ``bf16`` is DeepGEMM's bf16, ``te_*`` are Transformer Engine's grouped linears, ``snip_*``
the formats of fprop, dgrad and wgrad of both linears. Milliseconds of a microbatch, medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import gc
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import header, interleaved, refuse_without_cuda, write
from snip_megatron.gemm.selection import select_backend
from snip_megatron.layers.context import LinearHandle, LinearState, StepContext
from snip_megatron.layers.grouped import grouped_product
from snip_megatron.layers.padding import PaddedSplits
from snip_megatron.precision import Format, LinearId

MICROBATCHES = 4
SHAPES = {  # hidden, ffn, experts on this GPU, rows
    "deepseek-v3 E4": (7168, 2048, 4, 32768),
    "qwen3-235b E8": (4096, 1536, 8, 32768),
    "qwen3-30b E16": (2048, 768, 16, 32768),
    "qwen3-30b E128": (2048, 768, 128, 65536),
}
B, E, F = Format.BF16, Format.FP8, Format.FP4
SNIP = {"bf16": (B, B, B), "snip_fp8": (E, E, E), "snip_fp8_fp8_bf16": (E, E, B), "snip_fp4_fp8_bf16": (F, E, B)}


class Experts(torch.nn.Module):
    """One linear of all experts, with weights and gradients that follow each other in memory."""

    def __init__(self, count: int, n: int, k: int, context: StepContext) -> None:
        super().__init__()
        memory = torch.randn(count, n, k, device="cuda", dtype=torch.bfloat16).mul_(k**-0.5)
        gradients = torch.zeros(count, n, k, device="cuda")
        for e, (weight, gradient) in enumerate(zip(memory, gradients, strict=True)):
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


def snip_step(
    x: Tensor, probs: Tensor, g: Tensor, splits: list[int], linears: tuple[Experts, Experts], formats: Any
) -> Callable[[], None]:
    """Return a step of one contender of this project."""
    fc1, fc2 = linears

    def step() -> None:
        for linear in linears:
            linear.handles[0].state.formats = formats
            linear.handles[0].state.weights.clear()
        for _ in range(MICROBATCHES):
            x.grad = None
            rows = splits
            hidden, weights = x, probs
            if any(count % 128 for count in splits):
                rows = PaddedSplits(splits, 128, backwards=False, device=x.device)
                hidden, weights = rows.pad(x), rows.pad(probs)
            y = fc2(swiglu(fc1(hidden, rows), weights), rows)
            (rows.unpad(y) if isinstance(rows, PaddedSplits) else y).backward(g)

    return step


def te_steps(
    x: Tensor, probs: Tensor, g: Tensor, splits: list[int], linears: tuple[Experts, Experts]
) -> dict[str, Any]:
    """Return Transformer Engine's steps by name; none if it is not installed."""
    try:
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe
    except ImportError:
        return {}
    modules = []
    for own in linears:
        n, k = own.handles[0].weight.shape
        module = te.GroupedLinear(
            len(splits), k, n, bias=False, params_dtype=torch.bfloat16, device="cuda", fuse_wgrad_accumulation=True
        )
        for e, handle in enumerate(own.handles):  # the same memory for all contenders
            weight = getattr(module, f"weight{e}")
            weight.data = handle.weight.data
            weight.main_grad, weight.overwrite_main_grad = handle.weight.main_grad, False
        modules.append(module)

    def step(chosen: Any) -> None:
        for microbatch in range(MICROBATCHES):
            x.grad = None
            with te.autocast(enabled=chosen is not None, recipe=chosen):
                y = modules[0](x, splits, is_first_microbatch=microbatch == 0)
                y = modules[1](swiglu(y, probs), splits, is_first_microbatch=microbatch == 0)
            y.backward(g)

    recipes = {"te_bf16": None, "te_current": recipe.Float8CurrentScaling(), "te_block": recipe.Float8BlockScaling()}
    return {name: lambda chosen=chosen: step(chosen) for name, chosen in recipes.items()}


def measure(shape: tuple[int, int, int, int], rounds: int, *, ragged: bool) -> dict[str, float]:
    """Return contender → milliseconds of a microbatch."""
    hidden, ffn, experts, rows = shape
    shares = [random.Random(e).uniform(0.7, 1.3) for e in range(experts)]
    unit = 1 if ragged else 128
    splits = [max(1, round(rows * share / sum(shares) / unit)) * unit for share in shares]
    rows = sum(splits)
    context = StepContext(seed=1, backend=select_backend("hopper").backend)
    linears = Experts(experts, 2 * ffn, hidden, context), Experts(experts, hidden, ffn, context)
    x = torch.randn(rows, hidden, device="cuda").bfloat16().requires_grad_()
    g = torch.randn(rows, hidden, device="cuda").bfloat16()
    probs = torch.rand(rows, 1, device="cuda")
    calls: dict[str, Callable[[], object]] = {
        name: snip_step(x, probs, g, splits, linears, formats) for name, formats in SNIP.items()
    }
    calls |= {} if ragged else te_steps(x, probs, g, splits, linears)
    return {name: ms / MICROBATCHES for name, ms in interleaved(calls, rounds).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ragged", action="store_true", help="rows that are no multiples of 128")
    parser.add_argument("--commit")
    args = parser.parse_args()
    refuse_without_cuda()
    result: dict[str, Any] = header(args.commit) | {"ragged": args.ragged, "mlp": {}}
    for name in args.shapes:
        found = measure(SHAPES[name], args.rounds, ragged=args.ragged)
        result["mlp"][name] = {contender: round(ms, 3) for contender, ms in found.items()}
        print(name, {contender: f"{ms:.2f} ms, {found['bf16'] / ms:.2f} x bf16" for contender, ms in found.items()})
        write(args.out, result)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""The MLP of experts on one Hopper GPU: fc1, SwiGLU × probabilities, fc2, forward, backward and quantisation.

    python -m benchmarks.layers.experts --out results/layers/F.json [--shapes NAME ...] [--commit SHA]
    python -m benchmarks.layers.experts --cpu        # the reference at a tiny size, on any machine

Rows are uneven over experts (.7 to 1.3 of the mean) and multiples of 128, as a dispatcher that pads hands them over;
``--ragged`` leaves the padding to the MLP. All contenders accumulate weight gradients into FP32. Weights are quantised
once for four microbatches. Milliseconds of a microbatch, medians of interleaved rounds:

- ``bf16_deepgemm``, ``bf16_torch`` (``torch._grouped_mm``): one launch for each product; ``bf16``: the faster of them.
- ``te_bf16``, ``te_current``, ``te_block``: Transformer Engine's grouped linears.
- ``snip_fp8``, ``snip_fp8_tensor``: all GEMMs in one format. ``snip``: the solver's map, the fastest by the times that
  ``snip calibrate`` and trainings measure of such linears; ``map`` has its formats, ``predicted`` its milliseconds of
  GEMMs and quantisation.

``products`` has the milliseconds of each bf16 product by library, the addition to FP32 gradients included. ``errors``
has the relative errors of Y, ∂L/∂X and the weights' gradients to products of FP32 matrices.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.common import header, interleaved, refuse_without_cuda, write
from snip_megatron.gemm.deepgemm import grouped_library, why_not
from snip_megatron.gemm.grouped_hopper import group_rows, grouped_mm
from snip_megatron.gemm.selection import select_backend
from snip_megatron.layers.context import LinearHandle, LinearState, StepContext
from snip_megatron.layers.grouped import grouped_product
from snip_megatron.layers.padding import PaddedSplits
from snip_megatron.layers.swiglu import may_fuse_experts, weighted_swiglu
from snip_megatron.precision import Format, Gemm, LinearId
from snip_megatron.precision.budget import Budget
from snip_megatron.sensitivity.times import OptionTimes
from snip_megatron.solver import Choice, Item, solve
from snip_megatron.solver.problem import Problem as SolverProblem
from snip_megatron.timing.calibration.calibrate import calibrate
from snip_megatron.timing.calibration.clock import clock_for
from snip_megatron.timing.calibration.measure import Measurer
from snip_megatron.timing.calibration.workload import Workload
from snip_megatron.timing.cost_model import CostModel
from snip_megatron.timing.shapes import LinearShape

MICROBATCHES = 4
SHAPES = {  # hidden, ffn, experts on this GPU, rows
    "deepseek-v3 E4": (7168, 2048, 4, 32768),
    "qwen3-235b E8": (4096, 1536, 8, 32768),
    "qwen3-30b E16": (2048, 768, 16, 32768),
    "qwen3-30b E128": (2048, 768, 128, 65536),
}
LINEARS = ("fc1", "fc2")
TINY = {"tiny E2": (128, 128, 2, 256)}
CANDIDATES = (Format.FP8, Format.FP8_TENSOR)
Formats = tuple[Format, Format, Format]
Map = tuple[Formats, Formats]
"""The formats of fc1 and of fc2."""
UNIFORM: dict[str, Map] = {f"snip_{fmt.value}": ((fmt,) * 3, (fmt,) * 3) for fmt in CANDIDATES}


def as_in_training(weight: torch.nn.Parameter, gradient: Tensor) -> torch.nn.Parameter:
    """Give a weight what Megatron's DDP gives it: FP32 ``main_grad``, and a hook that forgets what autograd gets in its
    place. Otherwise autograd adds up these gradients without meaning, microbatch after microbatch.
    """
    weight.main_grad, weight.grad_added_to_main_grad = gradient, False  # type: ignore[attr-defined]
    weight.register_post_accumulate_grad_hook(lambda given: setattr(given, "grad", None))
    return weight


class Experts(torch.nn.Module):
    """One linear of all experts, with weights and gradients that follow each other in memory."""

    def __init__(self, count: int, n: int, k: int, context: StepContext, device: str) -> None:
        super().__init__()
        self.memory = torch.randn(count, n, k, device=device, dtype=torch.bfloat16).mul_(k**-0.5)
        self.gradients = torch.zeros(count, n, k, device=device)
        for e, (weight, gradient) in enumerate(zip(self.memory, self.gradients, strict=True)):
            self.register_parameter(f"weight{e}", as_in_training(torch.nn.Parameter(weight), gradient))
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

    def clear(self) -> None:
        self.x.grad = None
        self.fc1.gradients.zero_()
        self.fc2.gradients.zero_()


def snip_step(problem: Problem, formats: Map) -> Callable[[], Tensor]:
    """Return a step of one contender of this project. It returns the last result."""
    fc1, fc2, splits = problem.fc1, problem.fc2, problem.splits

    def step() -> Tensor:
        problem.context.quantizes = True
        for linear, chosen in zip((fc1, fc2), formats, strict=True):
            linear.handles[0].state.formats = chosen
            linear.handles[0].state.weights.clear()
        for _ in range(MICROBATCHES):
            problem.x.grad = None
            rows: Sequence[int] = splits
            hidden, probs = problem.x, problem.probs
            if any(count % 128 for count in splits):
                rows = PaddedSplits(splits, 128, backwards=False, device=hidden.device)
                hidden, probs = rows.pad(hidden), rows.pad(probs)
            y = fc1(hidden, rows)
            if may_fuse_experts(fc1.handles[0], fc2.handles[0]):
                x = weighted_swiglu(y, probs, rows, fc1.handles[0], fc2.handles[0])
            else:
                x = swiglu(y, probs)
            y = fc2(x, rows)
            y = rows.unpad(y) if isinstance(rows, PaddedSplits) else y
            y.backward(problem.g)
        return y

    return step


def solved(problem: Problem, device: str) -> tuple[Map, float]:
    """Return the fastest map by measured times, and its predicted milliseconds of a microbatch."""
    sizes = {name: (len(problem.splits), sum(problem.splits), *problem.weight(name)) for name in LINEARS}
    small = Workload(((256, 256, 256),), ((256, 256),), ((256, 256),), (), tuple(sizes.values()))
    measurer = Measurer(problem.context.backend, clock_for(torch.device(device)), CANDIDATES)
    model = CostModel(calibrate(measurer, small, {}))
    times = OptionTimes.predict(model, {name: _shape(name, *size) for name, size in sizes.items()}, CANDIDATES).seconds
    items = [
        Item(f"{name}:{gemm}", 0, of["bf16"], tuple(_choice(of, fmt) for fmt in (Format.BF16, *CANDIDATES)))
        for name, by_gemm in times.items()
        for gemm, of in by_gemm.items()
    ]
    chosen = solve(SolverProblem(Budget("loss", len(items)), tuple(items))).choices
    seconds = sum(times[name][gemm.value][chosen[f"{name}:{gemm.value}"].value] for name in times for gemm in Gemm)
    fc1, fc2 = ((chosen[f"{name}:fprop"], chosen[f"{name}:dgrad"], chosen[f"{name}:wgrad"]) for name in LINEARS)
    return (fc1, fc2), 1e3 * seconds / MICROBATCHES


def _shape(name: str, experts: int, rows: int, n: int, k: int) -> LinearShape:
    fused = {"fc1": "gradient", "fc2": "input"}[name]
    return LinearShape(rows // experts, n, k, MICROBATCHES * experts, matrices=experts, grouped=True, fused=fused)


def _choice(seconds: Mapping[str, float], fmt: Format) -> Choice:
    """A format with 8 bits costs the same loss wherever it is chosen, so that it has to save time."""
    return Choice(fmt, (float(fmt is not Format.BF16),), seconds["bf16"] - seconds[fmt.value])


class TorchLibrary:
    """bf16 products of all experts by torch. Its wgrad is bf16, and then added."""

    def __init__(self, splits: Sequence[int], device: str) -> None:
        self.rows = group_rows(tuple(splits), torch.device(device))

    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        return grouped_mm(x, w.transpose(1, 2), offs=self.rows.ends)

    def dgrad(self, g: Tensor, w: Tensor) -> Tensor:
        return grouped_mm(g, w, offs=self.rows.ends)

    def wgrad(self, g: Tensor, x: Tensor, out: Tensor) -> None:
        out.add_(grouped_mm(g.t(), x, offs=self.rows.ends))


class DeepGemmLibrary(TorchLibrary):
    """The same by DeepGEMM, whose wgrad is added in FP32."""

    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        out = x.new_empty(len(x), w.shape[1])
        grouped_library().m_grouped_bf16_gemm_nt_contiguous(x, w, out, self.rows.experts)
        return out

    def dgrad(self, g: Tensor, w: Tensor) -> Tensor:
        out = g.new_empty(len(g), w.shape[2])
        grouped_library().m_grouped_bf16_gemm_nn_contiguous(g, w, out, self.rows.experts)
        return out

    def wgrad(self, g: Tensor, x: Tensor, out: Tensor) -> None:
        counts = list(self.rows.splits), self.rows.counts
        grouped_library().k_grouped_bf16_gemm_tn_contiguous(g, x, out, *counts, out)


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
    found = {"torch": TorchLibrary(problem.splits, device)}
    has_deepgemm = device == "cuda" and why_not() is None
    return found | ({"deepgemm": DeepGemmLibrary(problem.splits, device)} if has_deepgemm else {})


def library_step(problem: Problem, library: TorchLibrary) -> Callable[[], Tensor]:
    """Return the step of a library in bf16."""

    def step() -> Tensor:
        for _ in range(MICROBATCHES):
            problem.x.grad = None
            y = _Groups.apply(problem.x, problem.fc1, library)  # type: ignore[no-untyped-call]
            y = _Groups.apply(swiglu(y, problem.probs), problem.fc2, library)  # type: ignore[no-untyped-call]
            y.backward(problem.g)
        return y  # type: ignore[no-any-return]

    return step


def products(problem: Problem, rounds: int, device: str) -> dict[str, dict[str, dict[str, float]]]:
    """Return linear → product → library → milliseconds in bf16."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in LINEARS:
        linear: Experts = getattr(problem, name)
        n, k = problem.weight(name)
        x, g = (torch.randn(sum(problem.splits), width, device=device).bfloat16() for width in (k, n))
        of = libraries(problem, device)
        calls = {
            "fprop": {each: partial(library.fprop, x, linear.memory) for each, library in of.items()},
            "dgrad": {each: partial(library.dgrad, g, linear.memory) for each, library in of.items()},
            "wgrad": {each: partial(library.wgrad, g, x, linear.gradients) for each, library in of.items()},
        }
        found[name] = {
            gemm: {each: round(ms, 4) for each, ms in milliseconds(by_library, rounds, device).items()}
            for gemm, by_library in calls.items()
        }
    return found


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
            weight.data, weight.overwrite_main_grad = handle.weight.data, False
            as_in_training(weight, handle.weight.main_grad)
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
    chosen, predicted = solved(problem, device)
    calls = {name: snip_step(problem, formats) for name, formats in (UNIFORM | {"snip": chosen}).items()}
    of_libraries: dict[str, Any] = {}
    if not ragged:  # their rows must be multiples of some number
        of_libraries = products(problem, rounds, device)
        calls |= {f"bf16_{name}": library_step(problem, each) for name, each in libraries(problem, device).items()}
        calls |= te_steps(problem) if device == "cuda" else {}
    expected = exact(problem)
    wrong = {name: errors(problem, call, expected) for name, call in calls.items()}
    found = {name: round(ms / MICROBATCHES, 3) for name, ms in milliseconds(calls, rounds, device).items()}
    best = min((name for name in found if name in ("bf16_torch", "bf16_deepgemm")), key=found.__getitem__, default=None)
    return {
        "mlp": {**({} if best is None else {"bf16": found[best]}), **found},
        "errors": wrong,
        "map": {name: [fmt.value for fmt in formats] for name, formats in zip(LINEARS, chosen, strict=True)},
        "predicted": round(predicted, 3),
        "bf16": best,
        "products": of_libraries,
    }


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
    result |= {key: {} for key in ("mlp", "errors", "map", "predicted", "bf16", "products")}
    for name, shape in shapes.items():
        for key, found in measure(shape, args.rounds, device, ragged=args.ragged).items():
            result[key][name] = found
        times = result["mlp"][name]
        base = times.get("bf16", times["snip"])
        print(name, {contender: f"{ms:.2f} ms, {base / ms:.2f} x bf16" for contender, ms in times.items()})
        print(f"  products {result['products'][name]}, predicted {result['predicted'][name]} ms")
        print(f"  map {result['map'][name]}, bf16 by {result['bf16'][name]}, errors {result['errors'][name]}")
        write(args.out, result)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

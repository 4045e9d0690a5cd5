"""The MLP of experts on one Hopper GPU: fc1, SwiGLU × probabilities, fc2, forward, backward and quantisation.

    python -m benchmarks.layers.experts --out results/layers/F.json [--shapes NAME ...] [--commit SHA]
    python -m benchmarks.layers.experts --cpu        # the reference at a tiny size, on any machine

Rows are those of ``snip calibrate``: uneven over experts (.7 to 1.3 of the mean), each number padded to a multiple of
128 as a dispatcher hands them over; ``--ragged`` leaves the padding to the MLP. All contenders accumulate weight
gradients into FP32, and run the backward in the launching thread, as a training under SNIP does. Weights are quantised
once for four microbatches. Milliseconds of a microbatch, medians of interleaved rounds:

- ``bf16_deepgemm``, ``bf16_torch`` (``torch._grouped_mm``): one launch for each product; ``bf16``: the faster of them.
- ``te_bf16``, ``te_current``, ``te_block``: Transformer Engine's grouped linears, with a launch for each expert.
  ``te_cutlass_bf16``: with CUTLASS's grouped products, as $NVTE_USE_CUTLASS_GROUPED_GEMM says.
  ``te_grouped_*``: the same with its grouped tensors, one launch for each product, and numbers of rows on the device;
  ``te_single_*``: with one weight of all experts besides. They need a newer cuBLASLt than torch's: 13.4, 13.5 for
  current and 13.6 for block scaling.
- ``torchao_block``: torchao's mixture by DeepGEMM, where both are installed.
- ``snip_bf16``, ``snip_fp8``, ``snip_fp8_tensor``: all GEMMs in one format. ``snip``: the solver's map, the fastest by
  the times that ``snip calibrate`` and trainings measure of such linears; ``map`` has its formats, ``predicted`` its
  milliseconds by these times, with those of SwiGLU. ``snip_device``: the same map with numbers of rows that only the
  device knows, where its kernels take them.

``products`` has the milliseconds of each bf16 product by library, the addition to FP32 gradients included. ``errors``
has the relative errors of Y, ∂L/∂X and the weights' gradients to products of FP32 matrices, ``host`` the milliseconds
that a microbatch takes the launching thread, ``saved`` the bytes of X of both linears that are saved for the backward.
``graphs`` has the milliseconds as a CUDA graph of the contenders whose host knows no number of rows (``--graphs``). A
contender that fails is in ``failed`` with its error. ``alone`` has the milliseconds of two steps of each contender
right after its first one. The file is written after each contender.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.common import header, host_milliseconds, interleaved, refuse_without_cuda, write
from benchmarks.layers.experts_steps import (
    MICROBATCHES,
    Experts,
    Map,
    Problem,
    libraries,
    library_step,
    makers_of_rivals,
    snip_step,
    swiglu,
)
from snip_megatron.layers.grouped import grouped_products
from snip_megatron.layers.swiglu import may_fuse_experts
from snip_megatron.numerics.quantize.operands import OperandSpec
from snip_megatron.precision import Format, Gemm
from snip_megatron.precision.budget import Budget
from snip_megatron.sensitivity.times import OptionTimes
from snip_megatron.solver import Choice, Item, solve
from snip_megatron.solver.problem import Problem as SolverProblem
from snip_megatron.timing.calibration import Workload, calibrate, compile_kernels
from snip_megatron.timing.cost_model import CostModel, LinearShape
from snip_megatron.timing.measure import Measurer, clock_for

SHAPES = {  # hidden, ffn, experts on this GPU, rows
    "deepseek-v3 E4": (7168, 2048, 4, 32768),
    "qwen3-235b E8": (4096, 1536, 8, 32768),
    "qwen3-30b E16": (2048, 768, 16, 32768),
    "qwen3-30b E128": (2048, 768, 128, 65536),
}
LINEARS = ("fc1", "fc2")
KEYS = ("mlp", "alone", "failed", "errors", "host", "graphs", "saved", "map", "predicted", "bf16", "products")
TINY = {"tiny E2": (128, 128, 2, 256)}
CANDIDATES = (Format.FP8, Format.FP8_TENSOR)
BF16: Map = ((Format.BF16,) * 3, (Format.BF16,) * 3)
LIBRARIES = ("bf16_torch", "bf16_deepgemm")
ON_DEVICE = ("bf16_torch", "snip_device", "te_grouped_", "te_single_")
"""Beginnings of the names of contenders whose host does not know the numbers of rows."""
Maker = Callable[[], Callable[[], Tensor]]
UNIFORM: dict[str, Map] = {f"snip_{fmt.value}": ((fmt,) * 3, (fmt,) * 3) for fmt in CANDIDATES}


def solved(problem: Problem, device: str) -> tuple[Map, float]:
    """Return the fastest map by measured times, and its predicted milliseconds of a microbatch."""
    sizes = {name: (len(problem.splits), problem.rows, *problem.weight(name)) for name in LINEARS}
    small = Workload(((256, 256, 256),), ((256, 256),), ((256, 256),), (), tuple(sizes.values()))
    measurer = Measurer(problem.context.backend, clock_for(torch.device(device)), CANDIDATES)
    model = CostModel(calibrate(measurer, small, {}, compilation=compile_kernels(measurer, small)))
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


def of_swiglu(problem: Problem, chosen: Map, rounds: int, device: str) -> float:
    """Return the milliseconds of SwiGLU and its gradient, unquantised, as they run under a map."""
    (n, _), (fc1, fc2) = problem.weight("fc1"), (linear.handles[0] for linear in (problem.fc1, problem.fc2))
    y, d = (torch.randn(sum(problem.splits), width, device=device).bfloat16() for width in (n, n // 2))
    problem.context.map_is_quantized, (fc1.state.formats, fc2.state.formats) = True, chosen
    products, inputs = grouped_products(fc2), (y, problem.probs, problem.splits, OperandSpec(Format.BF16, Format.BF16))

    def fused() -> None:
        products.swiglu(*inputs)
        products.swiglu_gradient(d, *inputs)

    def apart() -> None:
        torch.autograd.grad(swiglu(y, problem.probs), y, d)

    fuses = may_fuse_experts(fc1, fc2)
    y.requires_grad_(not fuses)
    return milliseconds({"swiglu": fused if fuses else apart}, rounds, device)["swiglu"]


def _shape(name: str, experts: int, rows: int, n: int, k: int) -> LinearShape:
    fused = {"fc1": "gradient", "fc2": "input"}[name]
    return LinearShape(rows // experts, n, k, MICROBATCHES * experts, matrices=experts, grouped=True, fused=fused)


def _choice(seconds: Mapping[str, float], fmt: Format) -> Choice:
    """A format with 8 bits costs the same loss wherever it is chosen, so that it has to save time."""
    return Choice(fmt, (float(fmt is not Format.BF16),), seconds["bf16"] - seconds[fmt.value])


def products(problem: Problem, rounds: int, device: str) -> dict[str, dict[str, dict[str, float]]]:
    """Return linear → product → library → milliseconds in bf16."""
    times: dict[str, dict[str, dict[str, float]]] = {}
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
        times[name] = {
            gemm: {each: round(ms, 4) for each, ms in milliseconds(by_library, rounds, device).items()}
            for gemm, by_library in calls.items()
        }
    return times


def exact(problem: Problem) -> dict[str, Tensor]:
    """Return the result and all gradients of a step of FP32 matrices, expert by expert."""
    parts: dict[str, list[Tensor]] = {"y": [], "dx": [], "dw1": [], "dw2": []}
    rows = (t.detach().float().split(problem.splits) for t in (problem.x, problem.g, problem.probs))
    for x, g, probs, fc1, fc2 in zip(*rows, problem.fc1.memory, problem.fc2.memory, strict=True):
        leaves = [t.float().requires_grad_() for t in (x, fc1, fc2)]
        gate, up = (leaves[0] @ leaves[1].t()).chunk(2, -1)
        y = (functional.silu(gate) * up * probs) @ leaves[2].t()
        for name, result in zip(parts, (y.detach(), *torch.autograd.grad(y, leaves, g)), strict=True):
            parts[name].append(result if name in ("y", "dx") else MICROBATCHES * result)
    return {name: torch.cat(result) if name in ("y", "dx") else torch.stack(result) for name, result in parts.items()}


def errors(problem: Problem, step: Callable[[], Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the relative error of each result of a step."""
    problem.clear()
    results = {"y": step().detach()} | problem.results
    return {
        name: float(f"{float((results[name].float() - truth).norm() / truth.norm()):.2e}")
        for name, truth in expected.items()
    }


def first_run(problem: Problem, maker: Maker) -> Callable[[], Tensor] | str:
    """Make a step and run it. Return the step, or why it fails in one line."""
    try:
        step = maker()
        step()
    except (ImportError, OSError, RuntimeError, ValueError, TypeError, AssertionError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    finally:
        problem.clear()
    return step


def replays(calls: Mapping[str, Callable[[], object]]) -> dict[str, Callable[[], object]]:
    """Return the replay of the CUDA graph of each call that a graph can hold."""
    by_name: dict[str, Callable[[], object]] = {}
    for name, call in calls.items():
        gc.collect()  # nodes of an earlier step's autograd graph belong to the stream that made them
        with torch.cuda.stream(torch.cuda.Stream()):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                call()
        except RuntimeError as error:
            print(f"{name}: no CUDA graph: {' '.join(str(error).split())[:300]}")
            generator = torch.cuda.default_generators[torch.cuda.current_device()]  # a failed capture leaves it in one
            generator.graphsafe_set_state(torch.Generator("cuda").graphsafe_get_state())
            continue
        by_name[name] = graph.replay
    return by_name


def milliseconds(calls: Mapping[str, Callable[[], object]], rounds: int, device: str) -> dict[str, float]:
    """Return the milliseconds of each call; on a CPU those of one."""
    if device == "cuda":
        return interleaved(calls, rounds)
    times = {}
    for name, call in calls.items():
        start = time.perf_counter()
        call()
        times[name] = 1e3 * (time.perf_counter() - start)
    return times


def makers_of_steps(problem: Problem, chosen: Map, device: str, *, ragged: bool) -> dict[str, Maker]:
    """Return what makes the step of each contender."""
    makers: dict[str, Maker] = {}
    if not ragged:  # their rows must be multiples of some number
        by_name = libraries(problem, device)
        makers |= {f"bf16_{name}": partial(library_step, problem, library) for name, library in by_name.items()}
        makers["snip_bf16"] = partial(snip_step, problem, BF16)
    makers["snip"] = partial(snip_step, problem, chosen)
    if all(grouped_products(problem.fc1.handles[0]).takes_device_rows(formats) for formats in chosen):
        makers["snip_device"] = partial(snip_step, problem, chosen, on_device=True)
    makers |= {name: partial(snip_step, problem, formats) for name, formats in UNIFORM.items()}
    return makers if ragged or device == "cpu" else makers | makers_of_rivals(problem)


def measure(
    shape: tuple[int, int, int, int],
    rounds: int,
    device: str,
    *,
    contenders: Sequence[str] = ("*",),
    graphed: bool = False,
    ragged: bool = False,
    library: str = "auto",
) -> Iterator[dict[str, Any]]:
    """Yield what is known of a shape, again whenever a contender has run.

    A contender takes part if its name matches one of ``contenders``. The ``graphed`` run as CUDA graphs as well.
    """
    row: dict[str, Any] = {key: {} for key in KEYS} | {"predicted": None, "bf16": None}
    problem = Problem(shape, device, ragged=ragged, library=library)
    chosen, predicted = solved(problem, device)
    row["map"] = {name: [fmt.value for fmt in formats] for name, formats in zip(LINEARS, chosen, strict=True)}
    expected = exact(problem)
    calls: dict[str, Callable[[], Tensor]] = {}
    for name, maker in makers_of_steps(problem, chosen, device, ragged=ragged).items():
        if not any(fnmatch(name, pattern) for pattern in contenders):
            continue
        start = time.perf_counter()
        call = first_run(problem, maker)
        if isinstance(call, str):
            row["failed"][name] = call
        else:
            calls[name], row["errors"][name] = call, errors(problem, call, expected)
            row["alone"] |= _of_a_microbatch(milliseconds({name: call}, 2, device))
        print(f"  {name}: {row['alone'].get(name, call)}, after {time.perf_counter() - start:.1f} s", flush=True)
        yield row
    row["mlp"] = _of_a_microbatch(milliseconds(calls, rounds, device))
    best = min((name for name in row["mlp"] if name in LIBRARIES), key=row["mlp"].__getitem__, default=None)
    if best is not None:
        row["mlp"], row["bf16"] = {"bf16": row["mlp"][best], **row["mlp"]}, best
    if device == "cuda":
        row["host"] = _of_a_microbatch({name: host_milliseconds(call) for name, call in calls.items()})
    yield row
    row["products"] = {} if ragged else products(problem, rounds, device)
    row["predicted"] = round(predicted + of_swiglu(problem, chosen, rounds, device), 3)
    measurable = {name: call for name, call in calls.items() if not name.startswith(("te_", "torchao_"))}
    row["saved"] = {name: problem.saved_inputs(call) for name, call in measurable.items()}
    yield row
    if graphed:
        on_device = {name: call for name, call in calls.items() if name.startswith(ON_DEVICE)}
        row["graphs"] = _of_a_microbatch(milliseconds(replays(on_device), rounds, device))
        yield row


def _of_a_microbatch(times: Mapping[str, float]) -> dict[str, float]:
    return {name: round(ms / MICROBATCHES, 3) for name, ms in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--contenders", nargs="*", default=["*"], help="patterns of their names (default: all)")
    parser.add_argument("--graphs", action="store_true", help="run them as CUDA graphs, too, where a graph holds them")
    parser.add_argument("--ragged", action="store_true", help="rows that are no multiples of 128")
    parser.add_argument("--library", default="auto", help="--snip-settings gemm_library; cublas: without DeepGEMM")
    parser.add_argument("--cpu", action="store_true", help="the reference at a tiny size, which any machine runs")
    parser.add_argument("--commit")
    args = parser.parse_args()
    if args.cpu:
        torch.compiler.set_stance("force_eager")  # compiling Megatron's SwiGLU takes a minute
    else:
        refuse_without_cuda()
    device, shapes = ("cpu", TINY) if args.cpu else ("cuda", {name: SHAPES[name] for name in args.shapes})
    result: dict[str, Any] = header(args.commit) | {"ragged": args.ragged, "library": args.library}
    result |= {key: {} for key in KEYS}
    for name, shape in shapes.items():
        print(name, flush=True)
        with torch.autograd.set_multithreading_enabled(False):  # as in a training under SNIP
            for row in measure(
                shape, args.rounds, device, contenders=args.contenders, graphed=args.graphs, ragged=args.ragged,
                library=args.library,
            ):  # fmt: skip
                result |= {key: result[key] | {name: row[key]} for key in KEYS}
                write(args.out, result)
        times = result["mlp"][name]
        base = times.get("bf16", next(iter(times.values()), 1.0))
        print(name, {contender: f"{ms:.2f} ms, {base / ms:.2f} x bf16" for contender, ms in times.items()})
        print(f"  host {result['host'][name]}, graphs {result['graphs'][name]}, saved {result['saved'][name]}")
        print(f"  failed {result['failed'][name]}")
        print(f"  products {result['products'][name]}, predicted {result['predicted'][name]} ms")
        print(f"  map {result['map'][name]}, bf16 by {result['bf16'][name]}, errors {result['errors'][name]}")
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

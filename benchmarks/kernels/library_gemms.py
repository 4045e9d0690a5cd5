"""The GEMMs of a linear by our call of cuBLASLt, by torch and by Transformer Engine: speed and errors, in one run.

    python -m benchmarks.kernels.library_gemms --out results/kernels/F.json [--seconds 75] [--commit SHA]

A row is a product, a format and a shape of ``benchmarks.layers.linear``:

- fprop and dgrad have a bf16 result. fp8 multiplies 1×128 tiles by 128×128 blocks, fp8_tensor has fast accumulation.
- wgrad is added to an FP32 gradient (``wgrad``) or to a bf16 one (``wgrad into bf16``). fp8 multiplies 1×128 tiles by
  1×128 tiles, fp8_tensor has no fast accumulation, and bf16 operands are not quantised.

``ms`` is library → median GPU milliseconds of a call, in turns, each on the next of several sets of operands, behind a
GPU that waits until a round is queued. ``host_us`` is how long a call occupies the launching thread. ``ratio`` is the
milliseconds over ours: below 1, a library is faster. ``error`` is the relative error of the result to float64, on a
sample of rows and columns, from the bf16 matrices; ``own_error`` the same from the quantised numbers. ``same_bits`` is
the share of equal numbers in the sample. A library without a kernel stands in ``failed``. ``geomean`` has the
geometric means of ``ratio``. Rows stop after ``--seconds``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.common import geomean, header, host_milliseconds, interleaved, refuse_without_cuda, write
from benchmarks.layers.linear import TOKENS, WEIGHTS
from snip_megatron.numerics.products.backend import unrounded
from snip_megatron.numerics.products.cublaslt import CublasLt, cublaslt, measured_choices
from snip_megatron.numerics.products.transformer_engine import TransformerEngineGemms, transformer_engine_gemms
from snip_megatron.numerics.quantize.operands import OperandSpec
from snip_megatron.precision import Format, Gemm

OURS = "cublaslt"
CASES = (
    *((gemm, fmt, None) for gemm in (Gemm.FPROP, Gemm.DGRAD) for fmt in (Format.FP8, Format.FP8_TENSOR)),
    *((Gemm.WGRAD, fmt, torch.float32) for fmt in (Format.FP8, Format.FP8_TENSOR, Format.BF16)),
    (Gemm.WGRAD, Format.FP8, torch.bfloat16),
    (Gemm.WGRAD, Format.BF16, torch.bfloat16),
)
"""(product, format, dtype of the gradient that wgrad is added to)."""
SAMPLE = 96  # rows and columns
_COLD_BYTES = 256 << 20  # of rotating operands, several times larger than the L2 cache
_MOST_SETS = 4
_RECIPES = {
    "tile": functional.ScalingType.BlockWise1x128,
    "block": functional.ScalingType.BlockWise128x128,
    "tensor": functional.ScalingType.TensorWise,
}
_FAILURES = (RuntimeError, AssertionError, TypeError, ValueError, ImportError, AttributeError)

Call = Callable[[], Tensor]


def name_of(case: tuple[Gemm, Format, torch.dtype | None]) -> str:
    gemm, fmt, dtype = case
    return f"{gemm.value} {fmt.value}" + (" into bf16" if dtype is torch.bfloat16 else "")


def matrices(gemm: Gemm, m: int, n: int, k: int, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Return the two bf16 matrices of a product as a linear has them: X and W, G and W, or G and X."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def drawn(rows: int, cols: int, scale: float = 1.0) -> Tensor:
        matrix = torch.randn(rows, cols, device=device, dtype=torch.bfloat16, generator=generator)
        return matrix.mul_(scale)

    if gemm is Gemm.FPROP:
        return drawn(m, k), drawn(n, k, k**-0.5)
    return drawn(m, n, 1e-3), drawn(n, k, k**-0.5) if gemm is Gemm.DGRAD else drawn(m, k)


def operands(gemm: Gemm, fmt: Format, left: Tensor, right: Tensor, quantize: Callable[..., Any]) -> tuple[Any, Any]:
    """Return both matrices as ``quantize`` makes them for the product."""
    if gemm is Gemm.WGRAD:
        return tuple(quantize(each, OperandSpec(None, fmt))[1] for each in (left, right))  # type: ignore[return-value]
    weight = OperandSpec(fmt, None, weight=True) if gemm is Gemm.FPROP else OperandSpec(None, fmt, weight=True)
    return quantize(left, OperandSpec(fmt, None))[0], quantize(right, weight)[0 if gemm is Gemm.FPROP else 1]


def our_call(case: tuple[Any, ...], a: Any, b: Any, out: Tensor | None, library: CublasLt, choices: Any) -> Call:
    """Return our call of cuBLASLt, as ``HopperBackend`` makes it."""
    fmt = case[1]

    def call() -> Tensor:
        if fmt is Format.BF16:
            assert out is not None
            result = library.multiply(a, b, out.dtype, transposed=(True, False), out=out, add=True)
        elif out is not None:
            result = library.multiply(a, b, out.dtype, out=out, add=True)
        else:
            fast = fmt is Format.FP8_TENSOR
            choice = choices.get((a.rows, b.rows, a.values.shape[1]), 0) if fast else 0
            result = library.multiply(a, b, torch.bfloat16, fast=fast, choice=choice)
        if result is None:
            raise RuntimeError("no kernel")
        return result

    return call


def torch_calls(case: tuple[Any, ...], a: Any, b: Any, out: Tensor | None) -> dict[str, Call]:
    """Return torch's ways: a scaled GEMM and a separate addition; unquantised, one GEMM that adds, too."""
    if case[1] is Format.BF16:
        assert out is not None
        into: Any = {"out_dtype": torch.float32} if out.dtype is torch.float32 else {}
        return {
            "torch": lambda: out.add_(unrounded(a.t(), b)),
            "torch addmm": lambda: torch.addmm(out, a.t(), b, out=out, **into),
        }
    options = {"output_dtype": torch.bfloat16 if out is None else torch.float32}
    options["use_fast_accum"] = a.scaling == "tensor" and out is None

    def call() -> Tensor:
        recipes = _RECIPES[a.scaling], _RECIPES[b.scaling]
        product = functional.scaled_mm(a.values, b.values.t(), a.scale, recipes[0], b.scale, recipes[1], **options)
        return product if out is None else out.add_(product)

    return {"torch": call}


def te_call(case: tuple[Any, ...], a: Any, b: Any, out: Tensor | None, gemms: TransformerEngineGemms) -> Call:
    return lambda: gemms.multiply(case[0], a, b, torch.bfloat16, out)


def sampled(gemm: Gemm, left: Tensor, right: Tensor) -> Tensor:
    """Return the float64 product of the sampled rows and columns."""
    if gemm is Gemm.WGRAD:
        left, right = left[:, :SAMPLE].t(), right[:, :SAMPLE]
    else:
        left, right = left[:SAMPLE], right[:SAMPLE].t() if gemm is Gemm.FPROP else right[:, :SAMPLE]
    return left.double() @ right.double()


def relative(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


def errors(
    case: tuple[Any, ...], left: Tensor, right: Tensor, operands: tuple[Any, Any], results: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return the errors of results on the sample, and the share of numbers that equal ours."""
    gemm, fmt, _ = case
    exact = sampled(gemm, left, right)
    quantised = exact
    if fmt is not Format.BF16:
        a, b = (operand.dequantize() for operand in operands)
        quantised = a[:SAMPLE].double() @ b[:SAMPLE].double().t()
    ours = results.get(OURS)
    return {
        "error": {name: relative(result, exact) for name, result in results.items()},
        "own_error": {name: relative(result, quantised) for name, result in results.items()},
        "same_bits": {} if ours is None else {n: float((each == ours).float().mean()) for n, each in results.items()},
    }


def rotating(calls: Sequence[Call]) -> Call:
    """Return a call that runs the next of ``calls`` each time."""
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def row_of(
    case: tuple[Any, ...],
    shape: tuple[int, int, int],
    quantize: Callable[..., Any],
    library: CublasLt,
    gemms: TransformerEngineGemms | None,
    choices: Any,
    rounds: int,
    device: str = "cuda",
    clock: Callable[..., dict[str, float]] = interleaved,
) -> dict[str, Any]:
    """Measure a row: errors of every library first, then their times in turns. ``shape`` is (M, N, K)."""
    gemm, fmt, dtype = case
    m, n, k = shape
    count = min(_MOST_SETS, max(1, -(-_COLD_BYTES // (m * n + m * k + n * k))))
    contenders: dict[str, list[Call]] = {}
    row: dict[str, Any] = {"gemm": name_of(case), "m": m, "n": n, "k": k, "sets": count, "failed": {}}
    results: dict[str, Tensor] = {}
    for seed in range(count):
        left, right = matrices(gemm, m, n, k, seed, device)
        quantised = operands(gemm, fmt, left, right, quantize) if fmt is not Format.BF16 else (left, right)
        out = None if dtype is None else torch.zeros(n, k, dtype=dtype, device=device)
        calls = {OURS: our_call(case, *quantised, out, library, choices), **torch_calls(case, *quantised, out)}
        if gemms is not None:
            try:
                calls["te"] = te_call(case, *operands(gemm, fmt, left, right, gemms.quantize), out, gemms)
            except _FAILURES as error:
                row["failed"]["te"] = f"{type(error).__name__}: {error}"[:300]
        for name, call in calls.items():
            if seed == 0:
                try:
                    results[name] = call()[:SAMPLE, :SAMPLE].clone()
                except _FAILURES as error:
                    row["failed"][name] = f"{type(error).__name__}: {error}"[:300]
                if out is not None:
                    out.zero_()
            if name in results:
                contenders.setdefault(name, []).append(call)
        if seed == 0:
            row |= errors(case, left, right, quantised, results)
        del left, right
    ready = {name: rotating(calls) for name, calls in contenders.items()}
    row["ms"] = clock(ready, rounds, warmup=max(2, count), head_start=True)
    row["host_us"] = (
        {name: 1e3 * host_milliseconds(call, 3) for name, call in ready.items()} if device == "cuda" else {}
    )
    row["ratio"] = {name: ms / row["ms"][OURS] for name, ms in row["ms"].items() if OURS in row["ms"]}
    return row


def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Return product → library → geometric mean of the ratios of the rows in which it ran."""
    ratios_of: dict[str, dict[str, float | None]] = {}
    for kind in dict.fromkeys(row["gemm"] for row in rows):
        of_kind = [row["ratio"] for row in rows if row["gemm"] == kind]
        names = dict.fromkeys(name for ratios in of_kind for name in ratios)
        ratios_of[kind] = {name: geomean([ratios[name] for ratios in of_kind if name in ratios]) for name in names}
    return ratios_of


def show(row: Mapping[str, Any]) -> str:
    """Return a line with the milliseconds of ours, and the ratios of the others."""
    shape = f"{row['m']:6d} x {row['n']:6d} x {row['k']:6d}"
    ratios = "  ".join(
        f"{name} {ratio:.3f} (error {row['error'][name]:.2e})" for name, ratio in row["ratio"].items() if name != OURS
    )
    failed = "".join(f"  {name} FAILED: {why}" for name, why in row["failed"].items())
    ours = f"{row['ms'][OURS]:8.3f} ms (error {row['error'][OURS]:.2e})" if OURS in row["ms"] else "no kernel"
    return f"{row['gemm']:24s} {shape}  {ours}  {ratios}{failed}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="cuBLASLt by ctypes, torch and Transformer Engine: GEMMs of a linear")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--rounds", type=int, default=25, help="timed calls of every library a row")
    parser.add_argument("--seconds", type=float, default=75.0, help="start no further shape after this time")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS[:1], help="tokens of a microbatch")
    parser.add_argument("--commit", help="what is measured, where the tree has no .git")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    refuse_without_cuda()
    started = time.monotonic()
    from snip_megatron.numerics.quantize.kernels.quantize import quantize_operands

    library = cublaslt()
    if library is None:
        sys.exit("library_gemms: cuBLASLt 12.9 or later cannot be loaded")
    gemms: TransformerEngineGemms | None = None
    try:
        gemms = transformer_engine_gemms()
    except Exception as error:  # an incompatible shared object may raise anything
        print(f"Transformer Engine cannot be imported ({type(error).__name__}: {error}): it is left out")
    choices = measured_choices(library.version, torch.cuda.get_device_name())
    rows: list[dict[str, Any]] = []
    result = header(arguments.commit) | {"cublaslt": library.version, "choices": len(choices), "rows": rows}
    for m in arguments.tokens:
        for k, n in WEIGHTS:
            if time.monotonic() - started > arguments.seconds:
                print(f"out of time before {k}→{n} at {m}: the result is incomplete")
                break
            for case in CASES:
                rows.append(row_of(case, (m, n, k), quantize_operands, library, gemms, choices, arguments.rounds))
                print(show(rows[-1]), flush=True)
                gc.collect()
                torch.cuda.empty_cache()
            result["geomean"] = means(rows)
            write(arguments.out, result)
    for kind, ratios in means(rows).items():
        print(f"{kind:24s}", "  ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items()))
    return 1 if any(OURS in row["failed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Grouped products of experts on a Hopper GPU by DeepGEMM against the loop over experts of the reference.

python -m pytest tests/gpu/test_grouped_gpu.py      # about 90 s, most of it compilation
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.layers.experts_steps import Problem, snip_step
from snip_megatron.numerics.products.backend import REFERENCE, assemble, flatten
from snip_megatron.numerics.products.deepgemm import find_nvcc, why_not
from snip_megatron.numerics.products.grouped import DeviceRows, GroupLoop, group_rows
from snip_megatron.numerics.products.grouped_hopper import HopperGroups
from snip_megatron.numerics.products.selection import select_backend
from snip_megatron.numerics.quantize import fake_quantize
from snip_megatron.numerics.quantize.operands import GradientKeys, OperandSpec
from snip_megatron.precision import Format, Gemm

BF16, FP8, FP4, TENSOR = Format.BF16, Format.FP8, Format.FP4, Format.FP8_TENSOR
EXPERTS = {
    "one": [1024],
    "uneven": [256, 0, 1280, 128, 384, 0, 640, 128],
    "128": [128 * (e % 5) for e in range(128)],
    "no rows": [0, 0, 0, 0],
}
pytestmark = pytest.mark.usefixtures("hopper")
needs_deepgemm = pytest.mark.skipif(why_not() is not None, reason=f"DeepGEMM {why_not()}")


def products(n: int, k: int) -> GroupLoop:
    result = select_backend("hopper").backend.grouped(n, k, torch.bfloat16)
    assert isinstance(result, HopperGroups)
    return result


def draws(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator(device="cuda").manual_seed(seed)).bfloat16()


def run(loop: GroupLoop, n: int, k: int, splits: list[int], formats: Any, gradients: list[Tensor]) -> list[Tensor]:
    """Y, ∂L/∂X and the gradients of all weights."""
    fprop, dgrad, wgrad = formats
    x, g = draws(sum(splits), k, seed=0), draws(sum(splits), n, seed=1)
    weights = list(draws(len(splits), n, k, seed=2).unbind(0))
    keys = GradientKeys(17, 18, torch.arange(n, device="cuda"))
    x_row, x_col = loop.quantize_rows(x, splits, OperandSpec(fprop, wgrad))
    w_row, w_col = loop.quantize_weights(weights, OperandSpec(fprop, dgrad, weight=True))
    g_row, g_col = loop.quantize_rows(g, splits, OperandSpec(dgrad, wgrad, keys=keys))
    y, d = loop.multiply(Gemm.FPROP, x_row, w_row, x.dtype), loop.multiply(Gemm.DGRAD, g_row, w_col, g.dtype)
    loop.accumulate(g_col, assemble(flatten(x_col)), gradients)
    return [y, d, torch.stack(gradients)]


@needs_deepgemm
@pytest.mark.parametrize("shape", [(1536, 2048), (2048, 768), (256, 128)])
@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("formats", [(FP8, FP8, FP8), (FP8, BF16, BF16), (BF16, FP8, FP8), (FP4, TENSOR, BF16)])
def test_products_are_those_of_every_expert_alone(shape: tuple[int, int], experts: str, formats: Any) -> None:
    (n, k), splits = shape, EXPERTS[experts]
    if experts == "128" and shape != (256, 128):
        pytest.skip("the reference takes too long")
    start = draws(len(splits), n, k, seed=3).float()
    expected = run(REFERENCE.grouped(n, k, torch.bfloat16), n, k, splits, formats, list(start.clone().unbind(0)))
    apart = [each.clone() for each in start]  # not one after the other in memory
    for gradients in (list(start.clone().unbind(0)), apart):
        close(run(products(n, k), n, k, splits, formats, gradients), expected)


def close(results: list[Tensor], expected: list[Tensor]) -> None:
    for actual, exact in zip(results, expected, strict=True):
        assert actual.shape == exact.shape
        error = (actual.double() - exact.double()).norm()
        assert error <= 5e-3 * exact.double().norm() + 1e-6


@pytest.mark.parametrize("shape", [(512, 512), (512, 256), (320, 192)])
@pytest.mark.parametrize("formats", [(FP8, FP8, FP8), (TENSOR, TENSOR, TENSOR), (FP4, BF16, FP8)])
def test_experts_have_any_number_of_rows(shape: tuple[int, int], formats: Any) -> None:
    """GEMMs run expert by expert, as they do without DeepGEMM or if a dimension is no multiple of 128."""
    (n, k), splits, backend = shape, [0, 1, 2, 3, 5, 37, 127, 128, 129, 260], select_backend("hopper").backend
    start = draws(len(splits), n, k, seed=3).float()
    actual, expected = (
        run(GroupLoop(each.quantize, each.multiply), n, k, splits, formats, list(start.clone().unbind(0)))
        for each in (backend, REFERENCE)
    )
    close(actual, expected)


@pytest.mark.parametrize("shape", [(512, 512), (512, 256)])
@pytest.mark.parametrize("rows", [1, 37, 128, 260, 640])
@pytest.mark.parametrize("where", ["new memory", "values", "scale"])
def test_wgrad_reads_nothing_beside_its_operands(shape: tuple[int, int], rows: int, where: str) -> None:
    """NaN stands in memory that is allocated, or beside the values or the scales of both operands."""
    (n, k), backend = shape, select_backend("hopper").backend
    matrices, out = [draws(rows, width, seed=width) for width in (n, k)], torch.zeros(n, k, device="cuda")
    for _ in range(3):  # Python launches, is recorded, and is replayed
        if where == "new memory":
            for size in (1 << 20, 64 << 20):  # the allocator's small and large blocks
                torch.full((size,), 255, dtype=torch.uint8, device="cuda")
        g, x = (backend.quantize(matrix, OperandSpec(None, FP8))[1] for matrix in matrices)
        for side in (g, x):
            assert not side.values[:, rows:].float().any()
            assert side.scale.isfinite().all()
        if where != "new memory":
            g, x = (side._replace(**{where: amid_nan(getattr(side, where))}) for side in (g, x))
        result = backend.multiply(Gemm.WGRAD, g, x, torch.float32, out.zero_())
        exact = g.dequantize().double() @ x.dequantize().double().t()
        assert (result.double() - exact).norm() <= 5e-3 * exact.norm()


def amid_nan(tensor: Tensor) -> Tensor:
    """Return a copy with NaN before and after its memory, whatever the number format: all bits are set."""
    size, space = tensor.numel() * tensor.element_size(), 1 << 16
    memory = torch.full((size + 2 * space,), 255, dtype=torch.uint8, device=tensor.device)
    inner = memory[space : space + size].view(tensor.dtype)
    return inner.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


RAGGED = {
    "few": (3, 0, 128, 130, 1, 77, 0),
    "one row": (0, 1, 0),
    "many": tuple(13 * (e * e % 11) for e in range(128)),
    "long": (2100, 0, 2050, 1),
}


@needs_deepgemm
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("splits", RAGGED.values(), ids=RAGGED)
def test_rows_without_padding_give_what_padded_copies_give(splits: tuple[int, ...], backwards: bool) -> None:
    """The operand of fprop or dgrad bit for bit, and wgrad to its rounding. The last calls are replayed."""
    (n, k), rows = (384, 256), group_rows(splits, torch.device("cuda"), backwards=backwards)
    loop, keys = products(n, k), GradientKeys(17, 18, torch.arange(n, device="cuda"), paired=True)
    for seed, fmt in itertools.product(range(3), (FP8, FP4)):
        x, g = draws(rows.unpadded, k, seed=seed), draws(rows.unpadded, n, seed=seed + 9)
        wgrads = []
        for alone, spec in ((x, OperandSpec(fmt, BF16)), (g, OperandSpec(fmt, BF16, keys=keys))):
            sides = loop.quantize_unpadded(alone, rows, spec), loop.quantize_rows(rows.pad(alone), rows, spec)
            actual, expected = (row.matrix for row, _ in sides)
            assert torch.equal(actual.values.view(torch.uint8), expected.values.view(torch.uint8))
            assert torch.equal(actual.scale, expected.scale)
            wgrads.append([col for _, col in sides])
        start = draws(len(splits), n, k, seed=3).float()
        exact = start.double()
        for out, of_g, of_x in zip(exact, *(rows.pad(t).split(rows) for t in (g, x)), strict=True):
            out += of_g.double().t() @ of_x.double()
        for of_g, of_x in ((0, 1), (1, 0)):
            out = start.clone()
            loop.accumulate(wgrads[1][of_g], wgrads[0][of_x], list(out.unbind(0)))
            assert (out - exact).norm() <= 1e-5 * exact.norm()


@needs_deepgemm
@pytest.mark.parametrize("splits", [*RAGGED.values(), (9000, 0, 4100)], ids=[*RAGGED, "very long"])
def test_wgrads_in_tiles_are_those_of_quantised_rows(splits: tuple[int, ...]) -> None:
    """One launch adds all of them, with numbers of rows on the host or the device; very long experts run one by one."""
    n, k, device = 384, 256, torch.device("cuda")
    loop, start = products(n, k), draws(len(splits), n, k, seed=3).float()
    for fmt, backwards in itertools.product((FP8, FP4), (False, True)):
        rows = group_rows(splits, device, backwards=backwards)
        x, g = draws(rows.unpadded, k, seed=0), draws(rows.unpadded, n, seed=9)
        exact = start.double()
        quantised = (fake_quantize(rows.pad(each), fmt, axis=0).double().split(rows) for each in (g, x))
        for out, of_g, of_x in zip(exact, *quantised, strict=True):
            out += of_g.t() @ of_x
        unread = DeviceRows(torch.tensor(splits, device=device), rows.unpadded, backwards=backwards)
        for each in (rows, unread):
            of_x, of_g = (loop.quantize_unpadded(t, each, OperandSpec(FP8, fmt))[1] for t in (x, g))
            out = start.clone()
            loop.accumulate(of_g, of_x, list(out.unbind(0)))
            assert (out - exact).norm() <= 1e-3 * exact.norm()


@needs_deepgemm
def test_an_mlp_of_experts_without_padding() -> None:
    """Fused in fp8 with wgrad in bf16, against the unfused one in bf16 by torch."""
    problem = Problem((512, 256, 8, 1200), "cuda", ragged=True)
    problem.splits = [3, 0, 300, 513, 128, 1, 0, 255]
    formats = (FP8, FP8, BF16)
    result = []
    for chosen in ((formats, formats), ((BF16, BF16, BF16), (BF16, BF16, FP8))):
        problem.clear()
        y = snip_step(problem, chosen)()
        result.append([y.detach(), *(t.clone() for t in problem.results.values())])
    for actual, exact in zip(*result, strict=True):
        assert (actual.double() - exact.double()).norm() <= 0.12 * exact.double().norm()


@needs_deepgemm
def test_listed_kernels_are_compiled_in_another_process_and_products_start_no_nvcc(tmp_path: Path) -> None:
    """The caches are empty. The kernels are those of experts and of a single linear."""
    code = (
        "import os, pathlib, torch\n"
        "from snip_megatron.numerics.products.selection import select_backend\n"
        "from snip_megatron.precision import Format\n"
        "from snip_megatron.timing.calibration import compile_kernels\n"
        "from snip_megatron.timing.measure import clock_for\n"
        "from snip_megatron.timing.measure import Measurer\n"
        "from snip_megatron.timing.calibration import Workload\n"
        "calls = lambda: pathlib.Path(os.environ['SNIP_NVCC'] + '.log').read_text().count('-cubin')\n"
        "backend, size = select_backend('hopper', checks=False).backend, (16, 32768, 1536, 2048)\n"
        "measurer = Measurer(backend, clock_for(torch.device('cuda', 0)), (Format.FP8,))\n"
        "work = Workload(((16384, 1536, 2048),), ((16384, 2048),), ((1536, 2048),), grouped=(size,))\n"
        "checked, compilation = calls(), compile_kernels(measurer, work)\n"
        "assert not compilation.running(120.0) and not compilation.remaining\n"
        "compiled = calls()\n"
        "measurer.grouped(size), measurer.gemms(work.gemms[0])\n"
        "print('calls of nvcc', checked, compiled, calls())\n"
    )
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f'#!/bin/sh\necho "$@" >> "$0.log"\nexec {find_nvcc()} "$@"\n')
    nvcc.chmod(0o755)
    caches = {"DG_JIT_CACHE_DIR": str(tmp_path / "dg"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    inherited = {name: value for name, value in os.environ.items() if name != "SNIP_NVCC"}  # set by an earlier test
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300,
        env={**inherited, **caches, "DG_JIT_NVCC_COMPILER": str(nvcc)},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    checked, compiled, measured = map(int, process.stdout.split("calls of nvcc")[1].split())
    assert checked == 0  # nothing is compared with cuBLASLt yet
    assert compiled >= checked + 3  # two grouped products and a dense one, or two
    assert measured == compiled
    assert "compilation failed" not in process.stdout

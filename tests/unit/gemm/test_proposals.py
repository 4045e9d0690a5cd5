"""Measured choices of cuBLASLt's proposals: which products take them, and when a table does not hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from snip_megatron.gemm.proposals import measured_choices
from snip_megatron.gemm.scaled import ScaledProducts
from snip_megatron.quantization import packed
from snip_megatron.quantization.packed import Operand

from .emulated_scaled_mm import scaled_mm

ROWS_A, ROWS_B, DEPTH = 64, 32, 256


class Library:
    """Takes proposal 3 for everything, or nothing."""

    def __init__(self, runs: bool = True) -> None:
        self.runs, self.calls = runs, []

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype, **options: Any) -> torch.Tensor | None:
        self.calls.append(options)
        return (a.dequantize() @ b.dequantize().t()).to(dtype) if self.runs else None


def products(library: Library) -> ScaledProducts:
    return ScaledProducts(scaled_mm, library, {(ROWS_A, ROWS_B, DEPTH): 3})


def operands(scaling: str) -> tuple[Operand, Operand]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, DEPTH, generator=generator).bfloat16() for rows in (ROWS_A, ROWS_B))
    if scaling == "tensor":
        return packed.quantize_tensor(a).row, packed.quantize_tensor(b).row
    return packed.quantize_tiles(a, "fp8", None).row, packed.quantize_blocks(b, "fp8", None).row


@pytest.mark.parametrize("runs", [True, False])
def test_a_product_in_the_table_runs_by_its_proposal(runs: bool) -> None:
    library = Library(runs)
    a, b = operands("tensor")
    found = products(library).multiply(a, b, torch.bfloat16)
    assert library.calls == [{"fast": True, "choice": 3}]
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), a.dequantize() @ b.dequantize().t(), rtol=1e-2, atol=1e-2)


def test_other_products_take_the_first() -> None:
    library = Library()
    a, b = operands("tensor")
    products(library).multiply(a, b, torch.float32)
    products(library).multiply(a, b, torch.bfloat16, fast=False)
    products(library).multiply(b, a, torch.bfloat16)
    products(library).multiply(*operands("tile"), torch.bfloat16)
    ScaledProducts(scaled_mm, library).multiply(a, b, torch.bfloat16)
    fast = [True, False, True, False, True]  # accumulation in the tensor core: with one scale a tensor only
    assert library.calls == [{"fast": each, "choice": 0} for each in fast]


def test_rows_that_the_library_refuses_are_padded_for_torch() -> None:
    library = Library()
    a = packed.quantize_tiles(torch.randn(6, DEPTH).bfloat16(), "fp8", None).row
    _, b = operands("tile")
    assert a is not None
    found = products(library).multiply(a, b, torch.bfloat16)
    assert library.calls == []
    torch.testing.assert_close(found.float(), a.dequantize() @ b.dequantize().t(), rtol=1e-2, atol=1e-2)


def test_a_table_holds_for_its_library_and_device_only(tmp_path: Path) -> None:
    path = tmp_path / "proposals.json"
    assert measured_choices(130100, "NVIDIA H200", path) == {}
    rows = [{"a_rows": 8192, "b_rows": 4096, "depth": 14336, "choice": 5, "gain": 1.1}]
    path.write_text(json.dumps({"cublaslt": 130100, "device": "NVIDIA H200", "rows": rows}))
    assert measured_choices(130100, "NVIDIA H200", path) == {(8192, 4096, 14336): 5}
    assert measured_choices(130200, "NVIDIA H200", path) == {}
    assert measured_choices(130100, "NVIDIA H100 80GB HBM3", path) == {}

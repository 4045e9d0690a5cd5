"""Transformer Engine's GEMMs one by one, over emulated quantizers."""

import re
import sys
from pathlib import Path

import pytest
import torch

from snip_megatron.numerics.products.check import wrong_numbers
from snip_megatron.numerics.products.transformer_engine import TransformerEngineGemms, import_fault
from snip_megatron.precision import Format

from .emulated_te import Quantizer, gemms, general_gemm
from .products import EVEN, operands, run, sides

FORMATS = (Format.FP8_TENSOR, Format.FP8, Format.MXFP8, Format.NVFP4)


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_check_before_training_passes_correct_gemms(fmt: Format) -> None:
    assert wrong_numbers(gemms(), "cpu", [fmt]) is None


def test_the_check_finds_a_gradient_rounded_to_nearest() -> None:
    nearest = TransformerEngineGemms(lambda fmt, tensor: Quantizer(fmt, "input"), general_gemm)
    assert "nvfp4 rounds gradients with a bias" in (wrong_numbers(nearest, "cpu", [Format.NVFP4]) or "")


CUDNN = "/lib/x86_64-linux-gnu/libcudnn_cnn.so.9: undefined symbol: _ZTV, version libcudnn_graph.so.9"


@pytest.mark.parametrize(
    ("package", "said"),
    [
        (
            f"raise OSError({CUDNN!r})",
            r"\(OSError: /lib.*libcudnn_graph\.so\.9; .* put \S.* first in LD_LIBRARY_PATH.*\)",
        ),
        ("raise ImportError('no\\nsuch file')", r"\(ImportError: no\)"),
    ],
)
def test_an_import_that_fails_is_one_line_that_says_what_to_do(
    package: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "transformer_engine"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "pytorch.py").write_text(f"{package}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)  # so that the test's package goes afterwards
        del sys.modules[name]
    assert re.fullmatch(f"needs Transformer Engine, whose import fails {said}", import_fault() or "")


def test_each_gemm_has_its_own_format() -> None:
    x, w, g = operands(*EVEN)
    formats = Format.FP8, Format.BF16, Format.MXFP8
    grad = torch.ones(EVEN[1], EVEN[2])
    y, d, grad_weight = run(gemms(), x, w, g, formats, grad)
    assert grad_weight is grad
    assert (y.dtype, d.dtype) == (torch.bfloat16, torch.bfloat16)
    exact = x.float() @ w.float().t(), g.float() @ w.float(), g.float().t() @ x.float() + 1
    for actual, expected, bound in zip((y, d, grad), exact, (0.06, 0.01, 0.06), strict=True):
        assert (actual.float() - expected).norm() < bound * expected.norm()
    x_row, x_col, _, w_col, g_row, g_col = sides(gemms(), x, w, g, formats)
    assert w_col is w  # unquantised
    assert g_row is g
    assert (x_row.col, x_col.row, g_col.row) == (None, None, None)  # each is made for one GEMM
    x_row, x_col, *_ = sides(gemms(), x, w, g, (Format.FP8,) * 3)
    assert x_row is x_col  # one call for both

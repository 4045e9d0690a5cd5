"""The check that the owner of a new GPU runs: its dry run on a CPU, and the page it writes."""

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import blackwell_check
from snip_megatron.precision import Format


def test_a_dry_run_reaches_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both backends in every format; emulation differs from the reference by the order of FP32 additions only."""
    out = tmp_path / "page.md"
    assert blackwell_check.main(["--dry-run", "--out", str(out), "--commit", "abc"]) == 0
    result = json.loads(out.with_suffix(".json").read_text())
    rows = {(row["backend"], row["format"]): row for row in result["rows"]}
    assert set(rows) == {(b, f.value) for b in ("reference", "emulated") for f in Format if f is not Format.BF16}
    assert max(row["difference"] for row in rows.values()) < 1e-6
    least = {"mxfp8": 25, "fp8": 25, "fp8_tensor": 25}
    assert all(min(row["decibel"].values()) > least.get(fmt, 12) for (_, fmt), row in rows.items())
    assert all(set(row["decibel"]) == {gemm.value for gemm in Format(fmt).gemms} for (_, fmt), row in rows.items())
    page = out.read_text()
    assert capsys.readouterr().out.strip() == page.strip()
    assert "Dry run: plain torch on a CPU" in page
    assert "commit abc" in page
    assert "| emulated | nvfp4 |" in page
    assert re.search(r"^\| emulated \| nvfp4_46 \| .* \| [0-9.]+, –, – \|$", page, re.MULTILINE)
    assert re.search(r"^\| emulated \| nvfp4_hadamard \| .* \| –, –, [0-9.]+ \|$", page, re.MULTILINE)
    assert "Not measured." in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert blackwell_check.main(["--out", str(tmp_path / "page.md")]) == 2
    assert capsys.readouterr().err == ("blackwell_check.py: needs a CUDA device; --dry-run shows that the check runs\n")
    assert not list(tmp_path.iterdir())

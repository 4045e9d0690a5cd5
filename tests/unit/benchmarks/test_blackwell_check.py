"""The check that the owner of a new GPU runs: its dry run on a CPU, and the page it writes."""

from __future__ import annotations

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


def test_speeds_and_what_misses_the_goal() -> None:
    first = {"bf16": 1, "emulated_nvfp4": 0.7, "emulated_mxfp8": 0.9}
    speeds = [
        {"shape": [8192, 4096, 4096], "ms": {"bf16": 1.2}, "speed": first},
        {"shape": [8192, 8192, 8192], "ms": {"bf16": 4.5}, "speed": {"bf16": 1, "emulated_nvfp4": 0.9}},
    ]
    result = {"device": "Some GPU", "date": "2026-01-01", "commit": "abc", "command": "python x.py", "versions": {},
              "dry_run": False, "rows": [], "refused": {"blackwell": "needs one"}, "speeds": speeds}  # fmt: skip
    page = blackwell_check.page(result)
    assert "- `blackwell` does not run here: needs one" in page
    assert "| T, N, K | bf16, ms | emulated_nvfp4 |" in page
    assert "| 8192, 4096, 4096 | 1.200 | 0.700 |" in page
    assert "Emulated formats below 0.80 × bf16 somewhere: emulated_nvfp4." in page

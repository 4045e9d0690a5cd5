"""The page of a verdict of ``snip blame``."""

from dataclasses import replace
from pathlib import Path

import pytest

from snip_megatron.reporting.blame import blame_page, write_blame_page
from snip_megatron.sensitivity.blame import (
    BUG,
    NOT_PRECISION,
    ROUNDING,
    UNFINISHED,
    Blame,
    Culprit,
    Fault,
    Harm,
    PassFigures,
    Remedy,
    Trial,
    Weights,
)

PATHS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
CULPRIT = ("decoder.layers.1.mlp.linear_fc1", "fprop")


def blamed(verdict: str) -> Blame:
    harm = tuple(
        Harm(
            name, gemm, "bf16" if layer == 0 else "fp8", 0.9 if (name, gemm) == CULPRIT else 0.001, 45.0, 1e-4, 0.01
        )
        for layer in range(3)
        for name in (f"decoder.layers.{layer}.{path}" for path in PATHS)
        for gemm in ("fprop", "dgrad", "wgrad")
    )  # fmt: skip
    culprit = Culprit(*CULPRIT, None, None, "fp8", 0.11, 0.02, 0.9, 0.97, confirmed=True)
    linear, gemm = CULPRIT
    shape = (256, 1408, 512)
    fault = Fault("gemm", linear, 1, "<node3>", "rows 96-127", gemm, None, "deepgemm", shape, 3.1, 30.0, "x.pt")
    return Blame(
        61, None, "snip", "36 GEMMs", verdict, "the job's formats <do> it",
        {"bf16": PassFigures(2.31, True), "reference": PassFigures(2.43, True), "kernels": PassFigures(None, False)},
        bug=fault if verdict == BUG else None,
        culprits=(culprit,) if verdict == ROUNDING else (),
        bisection=(Trial(6, 0.98), Trial(1, 0.97)) if verdict == ROUNDING else (),
        harm=harm,
        remedy=Remedy(
            ("--snip-pin", "decoder.layers.1.mlp.linear_fc1:fprop=bf16"), "a_map.json", "a.yaml", slowdown=1.004,
            notes=("no module for <TE>",),
        ) if verdict == ROUNDING else None,
        microbatches=3, step_microbatches=8, weights=Weights(60, "0123abcd"),
    )  # fmt: skip


def test_rounding_shows_culprit_path_and_remedy() -> None:
    page = blame_page(blamed(ROUNDING))
    for text in ("The job&#39;s formats &lt;do&gt; it.", "+1.20e-01", "not finite", "Bisection", "98 %"):
        assert text in page
    for way in ("--snip-pin decoder.layers.1.mlp.linear_fc1:fprop=bf16", "--snip-map a_map.json",
                "--te-precision-config-file a.yaml", "1.004 × as long", "No module for &lt;TE&gt;."):  # fmt: skip
        assert way in page
    assert "3 of 8 microbatches a rank of step 61, weights after step 60 (0123abcd)." in page
    assert page.count("<rect ") == 36
    assert page.count('class="bf16"') == 12
    assert page.count(' blamed"') == 1, "only the confirmed culprit is outlined"
    assert 'fill-opacity="1.00"><title>decoder.layers.1.mlp.linear_fc1:fprop, fp8: 90.0%' in page


def test_a_bug_shows_where_and_nothing_of_rounding() -> None:
    page = blame_page(blamed(BUG))
    for text in ("1 on &lt;node3&gt;", "rows 96-127", "256 × 1408 × 512", "3.1 dB", "x.pt"):
        assert text in page
    assert "Bisection" not in page
    assert "Remedy" not in page
    assert page.count(' blamed"') == 1


@pytest.mark.parametrize("verdict", [BUG, ROUNDING, NOT_PRECISION, UNFINISHED])
def test_a_page_has_no_script_and_nothing_from_elsewhere(verdict: str, tmp_path: Path) -> None:
    passes = {} if verdict == UNFINISHED else blamed(verdict).passes
    write_blame_page(replace(blamed(verdict), harm=(), passes=passes), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert "http:" not in page and "https:" not in page  # noqa: PT018
    assert "Harm of each GEMM" not in page

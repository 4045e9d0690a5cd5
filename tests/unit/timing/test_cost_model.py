"""Cost models, and Problems in seconds."""

from dataclasses import replace
from pathlib import Path

import pytest
from refusal import refusal

from snip_megatron.precision import Format, Gemm
from snip_megatron.precision.errors import SnipError
from snip_megatron.timing.cost_model import FLOPS_RATE, CostModel, FlopsModel, LinearShape, load_cost_model

from .timing_tables import FORMATS, FUSED, GEMM_SHARE, QUANTISED, RATE, SPEED, STOCK, formula_table

MODEL = CostModel(formula_table())
BF16, FP8, TENSOR, FP4 = FORMATS
SHAPE = LinearShape(tokens=2000, n=3000, k=700, microbatches=4)


def gemm(shape: LinearShape, index: int, fmt: Format) -> float:
    return GEMM_SHARE[index] * shape.tokens * shape.n * shape.k / RATE / SPEED[fmt]


def linear(model: CostModel, shape: LinearShape, *formats: Format) -> float:
    each = dict(zip(Gemm, formats, strict=True))
    saved = [model.joint(shape, g, fmt) for g, fmt in each.items() if fmt is each[Gemm.WGRAD]]
    return sum(model.seconds(shape, gemm, fmt) for gemm, fmt in each.items()) - sum(saved)


def test_a_quantised_linear_is_its_gemms_and_what_is_quantised_once_each() -> None:
    x, g, w = (SHAPE.tokens * SHAPE.k / QUANTISED, SHAPE.tokens * SHAPE.n / QUANTISED, SHAPE.n * SHAPE.k / QUANTISED)
    expected = 4 * (sum(gemm(SHAPE, i, FP8) for i in range(3)) + 1.8 * x + 2 * 1.8 * g) + 2 * w
    assert linear(MODEL, SHAPE, FP8, FP8, FP8) == pytest.approx(expected)
    fprop = 4 * (gemm(SHAPE, 0, FP8) + x) + w
    assert linear(MODEL, SHAPE, FP8, BF16, BF16) == pytest.approx(fprop + 4 * sum(gemm(SHAPE, i, BF16) for i in (1, 2)))


def test_each_expert_has_a_weight_to_quantise() -> None:
    shape = LinearShape(500, 3000, 700, microbatches=4 * 8)
    weights = replace(shape, matrices=8)
    more = linear(MODEL, weights, FP8, FP8, FP8) - linear(MODEL, shape, FP8, FP8, FP8)
    assert more == pytest.approx(7 * 2 * shape.n * shape.k / QUANTISED)


def test_a_grouped_linear_has_the_times_of_grouped_gemms() -> None:
    """By the formula they are those of one linear with the rows of all experts, and of a W for each expert."""
    shape = LinearShape(2000, 3000, 700, microbatches=4)
    grouped = replace(shape, tokens=250, microbatches=4 * 8, matrices=8, grouped=True)
    for g in Gemm:
        weights = 0.0 if g is Gemm.WGRAD else 7 * shape.n * shape.k / QUANTISED
        assert MODEL.seconds(grouped, g, FP8) == pytest.approx(MODEL.seconds(shape, g, FP8) + weights)
        assert MODEL.seconds(grouped, g, BF16) == pytest.approx(MODEL.seconds(shape, g, BF16))
    assert not MODEL.extrapolated(grouped)
    assert MODEL.extrapolated(replace(grouped, matrices=2))
    measured = LinearShape(256, 4096, 512, microbatches=2 * 4, matrices=4, grouped=True)
    bf16 = sum(MODEL.seconds(measured, g, BF16) for g in Gemm)
    assert MODEL.stock(measured) == pytest.approx((STOCK - 1) * bf16)
    assert MODEL.stock(grouped) == pytest.approx((STOCK - 1) * sum(MODEL.seconds(grouped, g, BF16) for g in Gemm))
    for fused, features in (("input", measured.n), ("gradient", measured.k)):  # a copy to rows without padding
        copied = measured.microbatches * 4 * measured.tokens * features / formula_table().copy_rate
        assert MODEL.stock(replace(measured, fused=fused)) == pytest.approx((STOCK - 1) * bf16 - copied)
    assert MODEL.stock(shape) == FlopsModel().stock(measured) == 0.0
    without = CostModel(replace(formula_table(), grouped={}))
    assert without.extrapolated(grouped)
    apart = replace(grouped, grouped=False)
    assert without.seconds(grouped, Gemm.FPROP, FP8) == MODEL.seconds(apart, Gemm.FPROP, FP8)


def test_an_operand_fused_with_swiglu_is_charged_what_it_adds() -> None:
    """It adds a copy of the MLP's output too. Wgrad, which would end the fusion, has the rest of both quantisations."""
    shape = LinearShape(1024, 4096, 512, matrices=4, grouped=True)
    x = 4096 * 512 / QUANTISED / 4
    for fused, first, times in (("input", Gemm.FPROP, 1), ("gradient", Gemm.DGRAD, 16)):
        fused_shape = replace(shape, fused=fused)
        copied = 4 * shape.tokens * (shape.n if fused == "input" else shape.k) / formula_table().copy_rate
        added = MODEL.seconds(fused_shape, first, FP8) - MODEL.seconds(shape, first, FP8) - copied
        assert added == pytest.approx(FUSED / 4 - times * x, rel=0.05)
        both = linear(MODEL, fused_shape, FP8, FP8, FP8) - linear(MODEL, shape, FP8, FP8, FP8) - copied
        assert both == pytest.approx(0, abs=1e-3 * times * x)


def test_a_variant_that_was_not_measured_takes_the_time_of_its_base() -> None:
    base, weight = Format.NVFP4, SHAPE.n * SHAPE.k / QUANTISED
    model = CostModel(formula_table(formats=(BF16, base)))
    for variant in (Format.NVFP4_46, Format.NVFP4_HADAMARD):
        for g in variant.gemms:  # half of a call more for fprop: W is not shared
            expected = model.seconds(SHAPE, g, base) + (0.0 if g is Gemm.WGRAD else weight)
            assert model.seconds(SHAPE, g, variant) == pytest.approx(expected)
    with pytest.raises(SnipError, match="have no mxfp4_hadamard"):
        model.seconds(SHAPE, Gemm.WGRAD, Format.MXFP4_HADAMARD)


def test_flops_model() -> None:
    model = FlopsModel()
    assert model.seconds(SHAPE, Gemm.WGRAD, BF16) == pytest.approx(4 * 2 * 2000 * 3000 * 700 / FLOPS_RATE)
    assert model.seconds(SHAPE, Gemm.WGRAD, FP4) == model.seconds(SHAPE, Gemm.WGRAD, BF16) / 4
    assert linear(model, SHAPE, BF16, FP8, FP4) == pytest.approx(
        (1 + 1 / 2 + 1 / 4) * model.seconds(SHAPE, Gemm.DGRAD, BF16)
    )


def test_models_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(formula_table().to_json())
    assert load_cost_model("flops").name == "flops"
    assert load_cost_model("h200").name == load_cost_model("NVIDIA H200").name == "NVIDIA H200"
    assert load_cost_model(path, "Formula 1").name == "Formula 1"
    assert load_cost_model("h100").name == load_cost_model("NVIDIA H100 80GB HBM3").name == "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("device", "table", "measured"),
    [
        ("NVIDIA H200 NVL", "h200", "NVIDIA H200"),
        ("NVIDIA GH200 480GB", "h200", "NVIDIA H200"),
        ("NVIDIA H100 NVL", "h100", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA H100 PCIe", "h100", "NVIDIA H100 80GB HBM3"),
    ],
)
def test_a_relative_without_a_table_takes_the_nearest(
    device: str, table: str, measured: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert load_cost_model(device, device).name == load_cost_model(table, device).name == measured
    warned = f"snip: warning: the times are those of {measured}, the nearest relative of {device}; snip calibrate"
    assert capsys.readouterr().err.count(warned) == 1


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("NVIDIA B200", None, "NVIDIA B200: neither a file of timings nor one of flops, h"),
        ("h200", "NVIDIA B200", "the timings of h200 were measured on NVIDIA H200, this is NVIDIA B200"),
        ("./", None, ".: cannot be read: Is a directory"),
    ],
)
def test_refusals(name: str, device: str | None, message: str) -> None:
    assert refusal(load_cost_model, name, device).startswith(message)

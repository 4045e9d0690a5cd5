"""Names, the map's lookup, its int8 codec, its JSON and its digest."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dense_names import dense_names
from hypothesis import given
from hypothesis import strategies as st
from refusal import refusal

from snip_megatron.precision import (
    DENSE_LAYER,
    STATUSES,
    VARIANTS,
    Format,
    Gemm,
    LinearId,
    LinearRow,
    PrecisionMap,
    Role,
    candidates_fault,
    fp4_fraction,
    misplaced,
    option_id,
    split_option_id,
)
from snip_megatron.precision.errors import SnipError

FORMATS = st.sampled_from(list(Format))
LINEARS = st.builds(
    LinearId, st.sampled_from(["decoder", "mtp"]), st.integers(0, 200), st.sampled_from([*DENSE_LAYER, "mixer.in_proj"])
)
KEYS = st.builds(option_id, LINEARS.map(str), st.one_of(st.none(), st.sampled_from(list(Gemm))))
CHOICES = st.dictionaries(KEYS, FORMATS, max_size=12).map(
    lambda drawn: {key: fmt for key, fmt in drawn.items() if misplaced(fmt, split_option_id(key)[1]) is None}
)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
MAPS = st.builds(
    PrecisionMap, CHOICES, version=st.integers(0, 2**31 - 1), status=st.sampled_from(STATUSES),
    achieved_per_stage=st.dictionaries(st.integers(0, 9).map(str), FINITE, max_size=3),
    **dict.fromkeys(("objective", "bound", "target", "achieved", "solve_seconds"), st.none() | FINITE),
)  # fmt: skip


def refused(text: str) -> str:
    message = refusal(PrecisionMap.from_json, text, where="map.json")
    assert message.startswith("map.json: ")
    return message.removeprefix("map.json: ")


def body(**changes: Any) -> dict[str, Any]:
    return {"schema": "snip.map/1", "version": 1, "choices": {"decoder.layers.0.mlp.linear_fc1": "fp4"}} | changes


@given(KEYS)
def test_option_ids_round_trip(key: str) -> None:
    linear, gemm = split_option_id(key)
    assert option_id(str(linear), gemm) == key


@pytest.mark.parametrize("name", ["", "decoder.layers.00.mlp.fc1", "decoder.layers.0.fc1\n", "decoder.layers.0.a..b"])
def test_what_names_no_linear_is_refused(name: str) -> None:
    with pytest.raises(SnipError, match="not the name of a decoder linear"):
        LinearId.parse(name)


def test_sub_blocks_number_the_residual_boundaries() -> None:
    rows = [LinearRow(name, 0, 1, 1) for name in dense_names(2)]
    assert [row.sub_block for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [row.role for row in rows] == [Role.READS, Role.WRITES] * 4


def test_a_gemm_wins_over_its_linear_and_absence_is_bf16() -> None:
    name = "decoder.layers.0.mlp.linear_fc1"
    chosen = PrecisionMap({name: Format.FP8, f"{name}:wgrad": Format.FP4})
    assert [chosen.format_of(name, g) for g in Gemm] == [Format.FP8, Format.FP8, Format.FP4]
    assert chosen.format_of("decoder.layers.1.mlp.linear_fc1", Gemm.FPROP) is Format.BF16
    assert chosen.linears() == [LinearId("decoder", 0, "mlp.linear_fc1")]


@given(st.lists(LINEARS.map(str), unique=True, max_size=6), st.data())
def test_codes_name_every_format(linears: list[str], data: st.DataObject) -> None:
    expected = {(n, g): data.draw(FORMATS) for n in linears for g in Gemm}
    codes = PrecisionMap({option_id(n, g): f for (n, g), f in expected.items()}).to_codes(linears)
    assert (codes.dtype, codes.shape) == (np.int8, (len(linears), 3))
    assert [list(Format)[code] for code in codes.ravel()] == list(expected.values())


@given(MAPS, KEYS, FORMATS)
def test_digest_is_equality_of_formats(precision_map: PrecisionMap, key: str, fmt: Format) -> None:
    linears = sorted({str(i) for i in precision_map.linears()} | {str(split_option_id(key)[0])})
    changed = replace(precision_map, choices={**precision_map.choices, key: fmt}, version=0, objective=None)
    same = bool((changed.to_codes(linears) == precision_map.to_codes(linears)).all())
    assert (changed.digest(linears) == precision_map.digest(linears)) is same


@given(MAPS)
def test_json_round_trip(precision_map: PrecisionMap) -> None:
    text = precision_map.to_json()
    assert PrecisionMap.from_json(text) == precision_map
    assert list(json.loads(text)["choices"]) == list(precision_map.choices)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": "snip.map/2"}, "schema: must be"),
        ({"choices": {"mlp": "fp4"}}, "'mlp' is not the name of a decoder linear"),
        ({"choices": {"decoder.layers.0.mlp.linear_fc1:up": "fp4"}}, "'up' is not one of"),
        ({"choices": {"decoder.layers.0.mlp.linear_fc1": "fp5"}}, "unknown format 'fp5'"),
        ({"status": "perfect"}, "status: 'perfect' is not one of"),
        ({"bound": float("nan")}, "bound: must be a finite number"),
        ({"achieved_per_stage": {"0": None}}, "achieved_per_stage['0']: must be a finite number"),
        ({"choices": {"decoder.layers.0.mlp.linear_fc1:dgrad": "nvfp4_46"}}, "a format of fprop, not of dgrad"),
        ({"choices": {"decoder.layers.0.mlp.linear_fc1": "nvfp4_46"}}, "not of dgrad"),
    ],
)
def test_bad_maps_are_named(changes: dict[str, Any], words: str) -> None:
    assert words in refused(json.dumps(body(**changes)))


def test_the_fp4_share_weighs_by_flops_and_counts_all_formats_of_four_bits() -> None:
    fc1, fc2 = flops = {"decoder.layers.0.mlp.linear_fc1": 3.0, "decoder.layers.0.mlp.linear_fc2": 1.0}
    assert fp4_fraction(PrecisionMap({f"{fc1}:fprop": Format.FP4}), flops) == 3 / 12
    mixed = {fc2: Format.NVFP4, f"{fc2}:dgrad": Format.FP8, f"{fc1}:wgrad": Format.MXFP4}
    assert fp4_fraction(PrecisionMap(mixed), flops) == pytest.approx((2 * 1 + 3) / 12)
    assert fp4_fraction(PrecisionMap.uniform([fc1], Format.FP4), flops, unquantised=6.0) == 0.5
    assert fp4_fraction(PrecisionMap({}), {}) == 0.0


def test_a_variant_belongs_to_its_base_and_its_gemms() -> None:
    assert (Format.NVFP4_46.base, Format.NVFP4_46.bits, Format.NVFP4_46.gemms) == (Format.NVFP4, 4, (Gemm.FPROP,))
    assert (Format.FP8.base, Format.FP8.gemms) == (Format.FP8, tuple(Gemm))
    assert {fmt for fmt in Format if fmt.base is not fmt} == set(VARIANTS)
    assert misplaced(Format.NVFP4_46, Gemm.FPROP) is None
    assert misplaced(Format.NVFP4_46, Gemm.WGRAD) == "nvfp4_46 is a format of fprop, not of wgrad"


def test_candidates_cover_every_gemm() -> None:
    assert candidates_fault(["mxfp8", "nvfp4_46"], granularity="gemm", share=True) is None
    assert candidates_fault(["fp8", "fp4"], granularity="layer", share=True) is None
    assert str(candidates_fault([], granularity="gemm", share=True)).startswith("expected distinct names of bf16, fp8")
    assert candidates_fault(["nvfp4_46", "nvfp4"], granularity="gemm", share=True) is None
    assert candidates_fault(["nvfp4_46"], granularity="gemm", share=True) == "none is a format of dgrad; add nvfp4"
    assert "not of dgrad, and at granularity layer" in str(
        candidates_fault(["fp8", "nvfp4_46"], granularity="layer", share=True)
    )
    assert candidates_fault(["fp8", "bf16"], granularity="gemm", share=False) is None
    assert "no candidate under fp4=" in str(candidates_fault(["fp8", "bf16"], granularity="gemm", share=True))
    assert "leaves nothing to choose" in str(candidates_fault(["bf16"], granularity="gemm", share=False))

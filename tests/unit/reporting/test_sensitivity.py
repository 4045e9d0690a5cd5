"""The ranked list of sensitive GEMMs: order, formats beside it, and what a list without some scores shows."""

import json

from snip_megatron.precision import Format, PrecisionMap, option_id
from snip_megatron.reporting.sensitivity import lines, rank, rank_run
from snip_megatron.runtime.run_data import load_run

FC1, FC2 = "decoder.layers.3.mlp.linear_fc1", "decoder.layers.3.mlp.linear_fc2"


def score(q: float) -> dict[str, float]:
    return {"delta_loss": q / 2, "delta_weight": 10 * q, "q": q}


def test_the_list_of_a_run_is_that_of_its_last_scores(whole_run):
    harms = rank_run(load_run(whole_run))
    scores = json.loads((whole_run / "scores" / "step_90.json").read_text())["scores"]
    assert {option_id(str(h.linear), h.gemm): h.score for h in harms} == {k: v["fp4"]["q"] for k, v in scores.items()}
    assert [h.score for h in harms] == sorted((h.score for h in harms), reverse=True)
    recorded = PrecisionMap.from_json((whole_run / "maps" / "step_95.json").read_text())
    assert all(h.chosen is recorded.format_of(str(h.linear), h.gemm) for h in harms)
    assert {h.chosen for h in harms[:5]} == {Format.FP8}
    assert {h.chosen for h in harms[-40:]} == {Format.FP4}


def test_each_gemm_has_the_figures_of_its_costliest_format():
    scores = {
        f"{FC1}:fprop": {"bf16": score(0.0), "fp8": score(3.0), "fp8_tensor": score(2.0)},
        f"{FC2}:fprop": {"bf16": score(0.0), "fp8": score(1.0), "fp8_tensor": score(4.0)},
        f"{FC2}:dgrad": {"bf16": score(0.0), "fp8": {"q": 0.5}},
        f"{FC2}:wgrad": {},
    }
    chosen = PrecisionMap.uniform([FC1, FC2], Format.FP8)
    harms = rank(scores, chosen)
    assert [(h.kind, h.costliest, h.score) for h in harms] == [
        ("mlp.linear_fc2:fprop", Format.FP8_TENSOR, 4.0),
        ("mlp.linear_fc1:fprop", Format.FP8, 3.0),
        ("mlp.linear_fc2:dgrad", Format.FP8, 0.5),
    ]
    assert (harms[0].delta_loss, harms[0].delta_weight) == (2.0, 40.0)
    assert (harms[2].delta_loss, harms[2].delta_weight) == (None, None)
    text = lines(harms, "nats")
    assert text[-3].split() == ["4.00e+00", "53.3%", "2.00e+00", "4.00e+01", "fp8", "fp8_tensor", f"{FC2}:fprop"]

"""The catalogue of planted faults, and how verdicts about them are judged."""

from collections import Counter
from typing import Any

import pytest

from benchmarks.quality.blame import judged, names, summary
from benchmarks.quality.blame_faults import BUG, HEALTHY, ROUNDING, Case, Catalogue, choices
from benchmarks.quality.blame_sites import Site


def catalogue(seed: int = 1, *, ranks: bool = True) -> list[Case]:
    return Catalogue(8, seed).build(ranks=ranks, experts=ranks)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_there_are_enough_cases_of_each_kind(seed: int) -> None:
    cases = catalogue(seed)
    counts = Counter(case.verdict for case in cases)
    assert counts[ROUNDING] >= 30
    assert counts[BUG] >= 30
    assert counts[HEALTHY] >= 20
    assert len({case.name for case in cases}) == len(cases)
    assert [case.name for case in cases] == [case.name for case in catalogue(seed)]


def test_a_map_names_every_gemm_and_the_last_pattern_wins() -> None:
    case = Case("fp4", ROUNDING, Site("a.fc1"), {"*": "fp8", "a.fc1": "fp4", "a.fc1:wgrad": "bf16"})
    chosen = choices(case, ["a.fc1", "a.fc2"])
    assert [chosen[f"a.fc1:{gemm}"] for gemm in ("fprop", "dgrad", "wgrad")] == ["fp4", "fp4", "bf16"]
    assert {chosen[f"a.fc2:{gemm}"] for gemm in ("fprop", "dgrad", "wgrad")} == {"fp8"}
    assert names("mixture")[2:7:4] == ["decoder.layers.0.mlp.linear_fc1", "decoder.layers.1.mlp.experts.linear_fc1"]


def blame(verdict: str, *blamed: dict[str, Any]) -> dict[str, Any]:
    culprits = list(blamed) if verdict == ROUNDING else []
    return {"verdict": verdict, "bug": blamed[0] if verdict == BUG else None, "culprits": culprits, "seconds": 2.0}


def test_a_bug_must_be_found_on_its_rank() -> None:
    case = Case("lost", BUG, Site("a.fc2", rank=1), {}, gemms=())
    for rank, right in ((1, True), (0, False)):
        line = judged(case, blame(BUG, {"linear": "a.fc2", "gemm": None, "rank": rank}), {})
        assert line["right"]
        assert line["first"] == right


def test_a_culprit_may_be_among_three_and_not_first() -> None:
    case = Case("fp4", ROUNDING, Site("a.fc1", "wgrad"), {}, gemms=("wgrad",))
    culprits = [{"linear": "a.fc1", "gemm": "fprop"}, {"linear": "a.fc1", "gemm": "wgrad"}]
    line = judged(case, blame(ROUNDING, *culprits), {"mse": ["a.fc1"], "underflow": ["a.fc2", "a.fc1"]})
    assert (line["first"], line["among_three"]) == (False, True)
    assert (line["first_by_mse"], line["first_by_underflow"]) == (True, False)
    wrong = judged(case, blame(BUG, {"linear": "a.fc1", "gemm": "wgrad", "rank": 0}), {})
    assert not wrong["right"]
    assert not wrong["first"], "the right GEMM for the wrong reason"


def test_healthy_steps_count_beside_faults() -> None:
    case = Case("healthy", HEALTHY, None, {})
    lines = [{"verdict": HEALTHY} | judged(case, blame(verdict), {}) for verdict in (HEALTHY, "unfinished", ROUNDING)]
    assert [line["right"] for line in lines] == [True, True, False]
    lines.append({"verdict": ROUNDING, "failed": "Error", "right": False})
    result = summary(lines)
    assert (result["faults"], result["healthy"], result["healthy_blamed"], result["failed"]) == (1, 3, 1, 1)
    assert result["verdict_right"] == 0.0

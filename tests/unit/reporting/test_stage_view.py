"""Maps by pipeline stage: shares counted from the formats, times from the run's own figures or a named model."""

import json

import pytest
import synthetic_run

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format, Gemm
from snip_megatron.records.run_data import load_run
from snip_megatron.reporting import stage_view as views
from snip_megatron.reporting.report import render

SHAPES = {name: {"tokens": 512, "n": 128, "k": 128} for name in synthetic_run.LINEARS}


@pytest.fixture
def path(tmp_path):
    return synthetic_run.write_run(tmp_path / "run")


def stage_view(run, cost, unreadable):
    return views.stage_view(run, views.recorded_linears(run, unreadable), cost, unreadable)


def with_facts(path, **facts):
    body = json.loads((path / "config.json").read_text())
    body["facts"] |= facts
    (path / "config.json").write_text(json.dumps(body))
    return load_run(path)


def test_flops_as_time(path):
    """Three quarters of equal GEMMs in fp4 and one in fp8: 0.75/4 + 0.25/2 of the bf16 time is left."""
    run = with_facts(path, linear_shapes=SHAPES)
    view = stage_view(run, None, unreadable := [])
    assert unreadable == []
    assert (view.linears, view.model) == ({"0": 12, "1": 12}, "flops")
    assert view.shares == {"0": 0.75, "1": 0.75}
    assert {k: after / before for k, (before, after) in view.times.items()} == pytest.approx({"0": 0.3125, "1": 0.3125})
    assert view.times["0"][0] == pytest.approx(12 * 3 * 2 * 512 * 128 * 128 / 1e15)


def test_linears_that_no_map_covers_are_in_the_denominator(path):
    """On stage 1 as many FLOPs again: half the share; a figure that is none is left out."""
    flops = 12 * 3 * 2.0 * 128 * 128
    view = stage_view(with_facts(path, unquantised_flops={"1": flops, "0": "many"}), None, [])
    assert view.shares == {"0": 0.75, "1": 0.375}


def test_the_times_that_the_run_solved_with_come_first(path):
    names = [f.value for f in Format]
    seconds = {n: {g.value: dict.fromkeys(names, 2.0) | {"fp4": 1.0} for g in Gemm} for n in synthetic_run.LINEARS}
    run = with_facts(path, linear_shapes=SHAPES, request={"times": {"model": "card", "seconds": seconds}})
    view = stage_view(run, None, [])
    assert view.model == "card"
    assert view.times["1"][1] / view.times["1"][0] == pytest.approx(0.625)
    assert stage_view(run, "h200", []).model == "NVIDIA H200"


def test_what_is_missing_is_left_out(path):
    run = load_run(path)  # no shapes: an earlier version's run
    view = stage_view(run, None, unreadable := [])
    assert (view.times, unreadable) == ({}, [])
    with pytest.raises(SnipError, match="nonsense"):
        stage_view(run, "nonsense", [])


@pytest.mark.parametrize("wrong", [{"size": 1}, {"n": {}}, {"k": 0}, {"tokens": 10**400}, {"microbatches": "4"}])
def test_broken_shapes_are_said(path, wrong):
    shapes = {name: SHAPES[name] | wrong for name in SHAPES}
    broken = with_facts(path, linear_shapes=shapes)
    assert stage_view(broken, None, unreadable := []).times == {}
    assert "linear_shapes" in unreadable[0]
    assert "linear_shapes" in render(broken)
    for file in (path / "stats").iterdir():
        file.unlink()
    assert stage_view(load_run(path), None, []) is None

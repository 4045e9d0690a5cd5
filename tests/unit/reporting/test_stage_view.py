"""Maps by pipeline stage: shares counted from the formats, times from the run's own figures."""

import json
from dataclasses import replace

import pytest
import synthetic_run

from snip_megatron.precision import Format, Gemm, PrecisionMap
from snip_megatron.reporting import stage_view as views
from snip_megatron.reporting.report import render
from snip_megatron.runtime.run_data import load_run
from snip_megatron.sensitivity.times import OptionTimes


@pytest.fixture
def path(tmp_path):
    return synthetic_run.write_run(tmp_path / "run")


def stage_view(run, unreadable):
    return views.stage_view(run, views.recorded_linears(run, unreadable), unreadable)


def with_facts(path, **facts):
    body = json.loads((path / "config.json").read_text())
    body["facts"] |= facts
    (path / "config.json").write_text(json.dumps(body))
    return load_run(path)


def test_linears_that_no_map_covers_are_in_the_denominator(path):
    """On stage 1 as many FLOPs again: half the share; a figure that is none is left out."""
    view = stage_view(load_run(path), unreadable := [])
    assert (view.linears, view.shares) == ({"0": 12, "1": 12}, {"0": 0.75, "1": 0.75})
    assert (view.times, unreadable) == ({}, [])
    flops = 12 * 3 * 2.0 * 128 * 128
    view = stage_view(with_facts(path, unquantised_flops={"1": flops, "0": "many"}), [])
    assert view.shares == {"0": 0.75, "1": 0.375}


def test_times_are_those_that_the_run_solved_with(path):
    names = [f.value for f in Format]
    seconds = {n: {g.value: dict.fromkeys(names, 2.0) | {"fp4": 1.0} for g in Gemm} for n in synthetic_run.LINEARS}
    view = stage_view(with_facts(path, request={"times": {"model": "card", "seconds": seconds}}), [])
    assert view.model == "card"
    assert view.times["1"][1] / view.times["1"][0] == pytest.approx(0.625)


@pytest.mark.parametrize(("measured", "of_bf16"), [(None, 18 / 24), (60.0, 54 / 60)])
def test_a_map_and_fp8_everywhere_are_compared_on_one_step_in_bf16(measured, of_bf16):
    """Six seconds are saved, of a step of 24 s in the model. A map has a speedup of its own, over a measured step."""
    names = synthetic_run.LINEARS[:2]
    times = {g.value: {"bf16": 2.0, "fp8": 1.0} for g in Gemm}
    times = OptionTimes("card", dict.fromkeys(names, times), rest={0: 12.0})
    prediction = views.Prediction(times, dict.fromkeys(names, 0))
    for fmt, expected in ((Format.FP8, 1.0), (Format.BF16, of_bf16)):
        chosen = replace(PrecisionMap.uniform(names, fmt), step_speedup=1.1)
        assert prediction.over_fp8(chosen, measured) == (Format.FP8, pytest.approx(expected))


def test_broken_times_are_said(path):
    broken = with_facts(path, request={"times": {"model": "card", "seconds": "fast"}})
    assert stage_view(broken, unreadable := []).times == {}
    assert "predicted times" in unreadable[0]
    assert "predicted times" in render(broken)
    for file in (path / "stats").iterdir():
        file.unlink()
    assert stage_view(load_run(path), []) is None

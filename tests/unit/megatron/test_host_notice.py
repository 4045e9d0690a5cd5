"""What a run says before its first step about the seconds of a budget of time: its host, its exchanges."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from snip_megatron.megatron.host_notice import say_how_exchanges_are_estimated, say_what_the_host_allows
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.sensitivity.times import HostSeconds, OptionTimes

KIND = "mlp.linear_fc1"
LINEARS: Any = [SimpleNamespace(name=f"decoder.layers.{i}.{KIND}", stage=0) for i in range(2)]
SECONDS = {gemm: {"bf16": 2.0, "fp8": 1.0} for gemm in ("fprop", "dgrad", "wgrad")}
TIMES = OptionTimes("GPU", {KIND: SECONDS}, rest={0: 1.0})  # a step: 13 s in bf16, 7 s in fp8


def said(times: OptionTimes, capsys: pytest.CaptureFixture[str]) -> list[str]:
    say_what_the_host_allows(SolveRequest(formats=("bf16", "fp8"), speedup=1.5, times=times), LINEARS)
    return capsys.readouterr().out.splitlines()


def test_times_without_host_seconds_are_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = said(TIMES, capsys)
    assert line.startswith("snip: the times of GPU hold no host seconds: step speedups are predicted as if the GPU")
    assert said(replace(TIMES, model="flops"), capsys) == []


def test_a_model_whose_steps_are_not_predicted_is_told_that_its_host_is_not_checked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (line,) = said(replace(TIMES, rest={}, host=HostSeconds({0: 9.0}, {"fp8": 0.5})), capsys)
    assert line.startswith(
        "snip: whole steps of this model or layout are not predicted: a --snip-budget of time is one"
    )
    assert said(replace(TIMES, model="flops", rest={}), capsys) == []


def test_a_budget_that_the_host_does_not_allow_is_said_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(replace(TIMES, host=HostSeconds({0: 5.0}, {"fp8": 0.1})), capsys) == []
    # 12 s of linears must become 8: four of six GEMMs in fp8, each of which launches half a second longer.
    (line,) = said(replace(TIMES, host=HostSeconds({0: 9.0}, {"fp8": 0.5})), capsys)
    assert line == (
        "snip: --snip-budget speedup=1.5 promises steps 1.44 × as fast as in bf16, and the host allows at most 1.18 ×:"
        " launching a step takes it 11 s, the GPU would take 9 s; capture CUDA graphs (--cuda-graph-impl), use larger"
        " microbatches (--micro-batch-size), or fewer tensor parallel ranks"
    )


def test_ranks_that_wait_for_the_slowest_host_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """The GPU would take 9 s, and launching takes 6.5 s on average."""
    host = HostSeconds({0: 6.1}, {"fp8": 0.1})
    assert said(replace(TIMES, host=replace(host, reserve=1.3)), capsys) == []
    (line,) = said(replace(TIMES, host=replace(host, reserve=1.5)), capsys)
    assert line.startswith(
        "snip: --snip-budget speedup=1.5 promises steps 1.44 × as fast as in bf16, and steps are likely to wait for the"
        " slowest host of the tensor parallel ranks: launching a step takes 6.5 s, the GPU would take 9 s; capture CUDA"
    )
    kept = replace(host, reserve=1.5)
    assert OptionTimes.from_dict(replace(TIMES, host=kept).as_dict(), "x").host == kept


def test_exchanges_without_measured_collectives_are_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    def of_exchanges(times: OptionTimes | None) -> list[str]:
        say_how_exchanges_are_estimated(SolveRequest(formats=("bf16", "fp8"), speedup=1.5, times=times))
        return capsys.readouterr().out.splitlines()

    (line,) = of_exchanges(replace(TIMES, exchanges={KIND: SECONDS}, estimated="at 350 GB/s a GPU"))
    assert line == (
        "snip: the times of GPU hold no collectives of this many tensor parallel ranks: exchanges are priced at 350"
        " GB/s a GPU (snip calibrate --ranks N measures them)"
    )
    assert of_exchanges(TIMES) == []
    assert of_exchanges(None) == []

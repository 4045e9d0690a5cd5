"""What a run says before its first step about the seconds of a budget of time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from snip_megatron.megatron.time_notice import say_how_exchanges_are_estimated
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.sensitivity.times import OptionTimes

KIND = "mlp.linear_fc1"
SECONDS = {gemm: {"bf16": 2.0, "fp8": 1.0} for gemm in ("fprop", "dgrad", "wgrad")}
TIMES = OptionTimes("GPU", {KIND: SECONDS}, rest={0: 1.0})


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

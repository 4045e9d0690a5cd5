"""When a run says that a map makes its steps longer."""

from pathlib import Path

import pytest

from snip_megatron.config import SnipConfig
from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.records.readers import read_events
from snip_megatron.records.run_directory import RunDirectory
from snip_megatron.runtime.account import Account, Stretch, is_quantised
from snip_megatron.runtime.coordinator import RankZeroCoordinator
from snip_megatron.sensitivity.request import SolveRequest

NAMES = ["decoder.layers.0.mlp.linear_fc1"]
FP4, BF16 = (PrecisionMap.uniform(NAMES, fmt, version=7) for fmt in (Format.FP4, Format.BF16))


class Pace:
    """Steps and adoptions one after the other."""

    def __init__(self) -> None:
        self.account, self.next = Account(), 0

    def adopted(self, precision_map: PrecisionMap) -> None:
        self.account.adopted(self.next, precision_map.version, is_quantised(precision_map))

    def step(self, seconds: float) -> Stretch | None:
        self.account.step(self.next, seconds)
        self.next += 1
        return self.account.slower()


def said(pace: Pace, *seconds: float) -> list[tuple[int | None, float | None, float | None]]:
    return [(found.version, found.bf16_s, found.step_s) for each in seconds if (found := pace.step(each)) is not None]


def test_longer_steps_are_said_once_a_map_by_medians_without_the_steps_that_compile() -> None:
    pace = Pace()
    assert not said(pace, 9.0, 9.0, 9.0, *[0.100] * 15, 0.5)
    pace.adopted(FP4)
    assert not said(pace, 8.0, 2.0, 2.0, *[0.110] * 14, 3.0)
    assert said(pace, 0.110, *[0.2] * 40) == [(7, 0.100, 0.110)]
    pace.adopted(FP4)  # the next one
    assert len(said(pace, *[0.120] * 30)) == 1


@pytest.mark.parametrize("seconds", [0.080, 0.100, 0.102])
def test_shorter_steps_and_noise_are_not(seconds: float) -> None:
    pace = Pace()
    said(pace, *[0.100] * 20)
    pace.adopted(FP4)
    assert not said(pace, *[seconds] * 40)


def test_rank_zero_prints_and_records_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(tmp_path, {}, overwrite=False, resume_step=None)
    config = SnipConfig(enabled=True, policy="bf16")
    coordinator = RankZeroCoordinator(config, SolveRequest(), (), None, run, unjudged=None)
    for step in range(20):
        coordinator.step_took(step, 0.1)
    coordinator.adopted(20, FP4)
    for step in range(20, 60):
        coordinator.step_took(step, 0.125)
    assert (
        capsys.readouterr().out.count(
            "snip: steps take 1.25 of what they took in bf16 (medians: 125.0 ms, 100.0 ms) under map 7"
        )
        == 1
    )
    run.close()
    (event,) = [event for event in read_events(tmp_path) if event["event"] == "slower"]
    assert (event["step"], event["version"], event["ratio"]) == (38, 7, 1.25)
    assert (event["bf16_s"], event["map_s"]) == (0.1, 0.125)

"""Which GPUs the runs of a comparison get."""

from pathlib import Path

import pytest

from benchmarks.quality.compare import devices
from benchmarks.quality.validate_proxy import main
from snip_megatron.precision.errors import SnipError

NANO = Path(__file__).resolve().parents[3] / "benchmarks/quality/experiments" / "nano.json"


@pytest.mark.parametrize(
    ("gpus", "ranks", "per_gpu", "expected"),
    [
        ([], 1, None, [None]),
        ([], 2, 3, [None] * 3),
        (["0", "1"], 1, 2, ["0", "1", "0", "1"]),
        (["0"], 1, None, ["0"] * 8),
        (["0", "1", "2", "3", "4"], 2, None, ["0,1", "2,3"]),
        (["4", "5"], 2, 2, ["4,5", "4,5"]),
    ],
)
def test_a_run_of_several_ranks_has_as_many_gpus(
    gpus: list[str], ranks: int, per_gpu: int | None, expected: list[str | None]
) -> None:
    assert devices(gpus, ranks, per_gpu) == expected


def test_too_few_gpus_and_no_run_are_refused() -> None:
    with pytest.raises(SnipError, match=r"training\.ranks: 2: a run needs as many GPUs, and 1 are used"):
        devices(["0"], 2, None)
    with pytest.raises(SnipError, match="--per-gpu 0"):
        devices([], 1, 0)


@pytest.mark.parametrize("fmt", ["fp9", "bf16", "nvfp4_hadamard"])
def test_a_format_that_cannot_be_compared_is_refused_before_the_warm_run(
    fmt: str, prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = map(str, (NANO, "--data", prepared, "--out", prepared / "out", "--gpus", "0", "--format", fmt))
    with pytest.raises(SystemExit, match="2"):
        main(list(arguments))
    assert fmt in capsys.readouterr().err
    assert not (prepared / "out").exists()

"""The picture of loss against time is what the committed results say."""

from benchmarks.quality.pareto import main


def test_the_committed_picture_is_current() -> None:
    assert main(["--check"]) == 0

"""The charts of docs/results are what the committed results say."""

from benchmarks.charts import main


def test_the_committed_charts_are_current() -> None:
    assert main(["--check"]) == 0

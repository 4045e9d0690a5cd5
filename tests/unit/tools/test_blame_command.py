"""``snip blame RUN``."""

from pathlib import Path

import pytest
import synthetic_run

from snip_megatron.sensitivity.blame import Blame, PassFigures
from snip_megatron.tools.cli import main


def test_the_verdict_or_the_arguments_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (9, 37):
        blame = Blame(step, None, "snip", "fp8", "not_precision", "it is the data", {"bf16": PassFigures(2.0, True)})
        (tmp_path / f"blame_{step}.json").write_text(blame.to_json())
    (tmp_path / "blame_37_map.json").write_text("{}")  # the map of a remedy
    assert main(["blame", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.index("step 9: not precision") < out.index("step 37: not precision")
    assert main(["blame", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


def test_a_run_without_a_verdict_says_how_to_ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It names the iteration of the latest alarm, and the map that was in force then."""
    synthetic_run.write_run(tmp_path / "run")
    assert main(["blame", str(tmp_path / "run")]) == 0
    assert f"--snip-blame {synthetic_run.STEPS}" in capsys.readouterr().out
    synthetic_run.add_event(tmp_path / "run", 40, "guard", action="taken_back", version=1, alarm_step=38)
    assert main(["blame", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "--snip-blame 39" in out
    assert f"--snip-map {tmp_path / 'run' / 'maps'}" in out

"""The panel "is training healthy": each check against records that need a look, and against records that do not."""

from pathlib import Path
from typing import Any

import pytest
import synthetic_run

from snip_megatron.reporting.health import checks, loss_spikes
from snip_megatron.reporting.report import render
from snip_megatron.runtime.run_data import load_run


def verdicts(path: Path) -> dict[str, tuple[str, bool | None]]:
    return {check.name: (check.text, check.healthy) for check in checks(load_run(path))}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return synthetic_run.write_run(tmp_path / "run", faults=False)


def test_a_healthy_run(path: Path) -> None:
    assert verdicts(path) == {
        "Loss": ("never NaN or Inf; no spike", True),
        "Guard": ("no alarm", True),
        "Updates": ("5 of 5 adopted", True),
        "Rise of the loss": ("not measured: no map of this run was tried before it was adopted", None),
        "Records": ("complete", True),
    }
    assert 'class="look"' not in render(load_run(path))


def test_spikes_and_broken_losses(path: Path) -> None:
    def spike(row: dict[str, Any]) -> None:
        row["loss"] = {80: 30.0, 110: None}.get(row["step"], row["loss"])

    synthetic_run.rewrite(path, "metrics.jsonl", spike)
    assert loss_spikes(load_run(path)) == [80]
    assert verdicts(path)["Loss"] == ("NaN or Inf: 1, the last at step 110; spikes: 1, the last at step 80", False)
    assert 'class="look"' in render(load_run(path))


def test_faults_of_updates_the_guard_and_records(path: Path) -> None:
    synthetic_run.add_event(path, 96, "guard", action="taken_back", version=5, reason="3 losses in a row above 4")
    synthetic_run.add_event(path, 97, "dropped", reason="not finite: g2")
    synthetic_run.add_event(path, 98, "records_lost", kinds={"metrics.jsonl": 12})
    (path / "maps" / "step_15.json").write_text("{")
    health = verdicts(path)
    assert health["Guard"] == ("1 taken back, the last before step 96", False)
    assert health["Updates"] == ("5 of 6 adopted, 1 dropped; the last reason: not finite: g2", False)
    assert health["Records"] == ("12 of metrics.jsonl lost, files unreadable or damaged: 1", False)


@pytest.mark.parametrize(("rise", "within"), [(0.0011, True), (0.0031, False)])
def test_a_measured_rise_stands_beside_its_prediction_and_its_bound(tmp_path: Path, rise: float, within: bool) -> None:
    path = synthetic_run.write_run(tmp_path / "run", faults=False, config={"budget": "loss=0.002"})
    tried = {"measured_rise": rise, "measured_error": 0.0004, "predicted_rise": 0.0009}

    def measure(row: dict[str, Any]) -> None:
        if row["event"] == "adopt" and row["version"] == 5:
            row.update(tried)

    synthetic_run.rewrite(path, "events.jsonl", measure)
    text = f"map 5 raised it by {rise:.2g} ± 0.0004 nats as measured, predicted 0.0009, bound 0.002"
    assert verdicts(path)["Rise of the loss"] == (text, within)
    page = render(load_run(path))
    assert "<th>measured rise, nats</th>" in page
    assert f"<td>{rise:.2g} ± 0.0004</td>" in page
    assert f"<dt>measured rise of the loss, nats</dt><dd>{rise:.2g} ± 0.0004</dd>" in page


@pytest.mark.parametrize(
    ("measured", "last", "healthy"),
    [
        ([0.0009], "as measured, predicted 0.0001", True),
        ([0.0009, 0.0011, 0.001], "; 3 maps: 0.001 ± 6e-05, predicted 0.0001, 10 times the prediction", False),
        ([0.0009, -0.0008, 0.0003], "; 3 maps: 0.00013 ± 0.0005, predicted 0.0001", True),  # of either sign
    ],
)
def test_rises_many_times_their_predictions_are_named(
    path: Path, measured: list[float], last: str, healthy: bool
) -> None:
    tried = dict(zip((5, 4, 3), measured, strict=False))

    def measure(row: dict[str, Any]) -> None:
        if row["event"] == "adopt" and row["version"] in tried:
            row.update(measured_rise=tried[row["version"]], measured_error=0.0001, predicted_rise=0.0001)

    synthetic_run.rewrite(path, "events.jsonl", measure)
    text, verdict = verdicts(path)["Rise of the loss"]
    assert text.endswith(last)
    assert verdict is healthy

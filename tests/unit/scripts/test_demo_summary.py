"""scripts/demo_summary.py: what it understands of Megatron's output, and that it refuses each missing result."""

import importlib.util
import io
import json
from pathlib import Path

import pytest

from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.runtime.run_directory import RunDirectory

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "demo_summary.py"
specification = importlib.util.spec_from_file_location("demo_summary", SCRIPT)
demo_summary = importlib.util.module_from_spec(specification)
specification.loader.exec_module(demo_summary)

# Copied from the output of megatron-core 0.19.0.
ITERATION = (
    " [2026-11-21 08:31:04.578990] iteration       10/     300 | consumed samples:           80 | elapsed time per "
    "iteration (ms): 225.6 | learning rate: 2.000000E-03 | global batch size:     8 | lm loss: 6.265135E+00 "
    "| loss scale: 1.0 | grad norm: 1.565 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
VALIDATION = (
    " validation loss at iteration 300 on validation set | lm loss value: 4.248630E+00 | lm loss PPL: 7.001E+01 | \n"
)


def test_watch_keeps_every_line_and_shows_progress(capsys: pytest.CaptureFixture[str]) -> None:
    log = io.StringIO()
    lines = ["noise\n", ITERATION, "more noise\n", VALIDATION, "snip: something to say\n"]
    demo_summary.watch(lines, log)
    assert log.getvalue() == "".join(lines)
    shown = capsys.readouterr().out.splitlines()[1:]
    assert shown == [
        "step   10/300   loss 6.2651   0.23 s a step",
        "step  300       validation loss 4.2486",
        "snip: something to say",
    ]


@pytest.fixture
def result(tmp_path: Path) -> dict[str, Path]:
    """What a good demonstration leaves: two adopted maps, metrics, data, log."""
    run = RunDirectory(tmp_path / "run", {"budget": "fp4=0.75"}, overwrite=False, resume_step=None)
    for version, step in ((1, 50), (2, 110)):
        linear = "decoder.layers.0.mlp.linear_fc1"
        made = PrecisionMap.uniform([linear], Format.FP4, version=version, status="optimal", achieved=0.76)
        run.write("maps", step, made.to_json())
        run.event(step, "adopt", version=version, status="optimal", achieved=0.76, fp4_fraction=0.76, changed=3)
        run.metric(step, loss=5.0, grad_norm=1.0, fp4_fraction=0.76)
    run.close()
    data = tmp_path / "data"
    data.mkdir()
    (data / "manifest.json").write_text(json.dumps({"valid": {"unigram_entropy_nats": 5.5}}))
    (tmp_path / "train.log").write_text(VALIDATION)
    return {
        "run": tmp_path / "run",
        "data": data,
        "log": tmp_path / "train.log",
        "gpu_run": SCRIPT.parents[1] / "examples" / "recorded_run",
    }


def edit_events(run: Path, old: str, new: str) -> None:
    path = run / "events.jsonl"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


@pytest.mark.parametrize("spoil", ["status", "achieved", "loss", "no loss", "nan", "map"])
def test_each_demand_can_fail(result: dict[str, Path], spoil: str, capsys: pytest.CaptureFixture[str]) -> None:
    if spoil == "status":
        edit_events(result["run"], '"optimal"', '"feasible"')
    elif spoil == "achieved":
        edit_events(result["run"], '"achieved": 0.76', '"achieved": 0.7499')
    elif spoil == "map":
        (result["run"] / "maps" / "step_110.json").unlink()
    else:
        text = {"loss": VALIDATION.replace("4.248630", "5.060001"), "no loss": "", "nan": VALIDATION}[spoil]
        result["log"].write_text(text.replace("4.248630E+00", "nan") if spoil == "nan" else text)
    assert demo_summary.check(**result) == 1
    captured = capsys.readouterr()
    assert (
        ("is not the map that was adopted" in captured.err)
        if spoil == "map"
        else ("NOT MET" in captured.out and "verdict: a demand is not met" in captured.out)
    )

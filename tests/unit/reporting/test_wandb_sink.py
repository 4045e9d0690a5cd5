"""The wandb sink against real wandb in offline mode, read back from the run's file."""

from __future__ import annotations

import json
import math

import pytest
from wandb_file import history

from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.reporting.sinks import GIVE_UP_AFTER
from snip_megatron.reporting.wandb_sink import WandbSink

wandb = pytest.importorskip("wandb")

LINEARS = ["decoder.layers.0.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc2"]


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """The wandb module with an open offline run, as Megatron's ``get_wandb_writer()`` returns it."""
    for name, value in {"MODE": "offline", "SILENT": "true", "DISABLE_CODE": "true", "DISABLE_GIT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    run = wandb.init(dir=tmp_path, project="snip", name="test", settings=wandb.Settings(x_disable_stats=True))
    yield wandb
    run.finish()


def rows_of(tmp_path):
    """Rows by wandb step; a step logged twice would show as two rows."""
    wandb.finish()
    wandb.teardown()  # the service has written everything only once it has ended
    (file,) = (path for path in tmp_path.glob("wandb/offline-run-*/*.wandb"))
    rows = history(file)
    assert len({row["_step"] for row in rows}) == len(rows)
    return {row["_step"]: row for row in rows}


def test_figures_join_megatrons_rows(offline, tmp_path):
    sink = WandbSink(offline)
    for step in range(4):  # the order of a training loop: hook before the step, the step, Megatron's own log
        sink.event(step, "probe", kind="statistics", seconds=0.25, tokens=512, wait_s=None)
        sink.event(step, "probe", kind="forward_noise", seconds=0.5)
        offline.log({"lm loss": 5.0 - step}, step + 1)
        sink.metric(step, fp4_fraction=step / 4, grad_norm=math.nan, loss=None)
    rows = rows_of(tmp_path)
    assert sink.last_error is None
    assert sorted(rows) == [0, 1, 2, 3, 4]
    for step in range(4):
        assert rows[step + 1]["lm loss"] == 5.0 - step
        assert rows[step + 1]["snip/fp4_fraction"] == step / 4
        assert rows[step]["snip/probe/statistics/seconds"] == 0.25
        assert rows[step]["snip/probe/forward_noise/seconds"] == 0.5
    names = {name for row in rows.values() for name in row}
    assert not names & {"snip/grad_norm", "snip/loss", "snip/probe/statistics/wait_s", "snip/probe/statistics/kind"}


def test_late_figures_are_not_dropped(offline, tmp_path):
    sink = WandbSink(offline)
    offline.log({"lm loss": 1.0}, 10)
    sink.begin_step(10)
    sink.metric(7, fp4_fraction=0.5)
    offline.log({"lm loss": 2.0}, 11)
    rows = rows_of(tmp_path)
    assert rows[10]["snip/fp4_fraction"] == 0.5
    assert rows[11]["lm loss"] == 2.0


def test_map_is_a_table_and_stages_are_panels(offline, tmp_path):
    sink = WandbSink(offline)
    choices = {f"{LINEARS[0]}:fprop": Format.FP8, f"{LINEARS[0]}:dgrad": Format.FP4, LINEARS[1]: Format.FP4}
    precision_map = PrecisionMap(choices=choices)
    sink.event(8, "adopt", version=2, status="optimal", achieved=0.76, achieved_per_stage={"0": 0.75, "1": 0.77})
    sink.precision_map(8, precision_map)
    row = rows_of(tmp_path)[8]
    assert row["snip/adopt/achieved_per_stage/0"] == 0.75
    assert row["snip/adopt/achieved_per_stage/1"] == 0.77
    assert row["snip/adopt/version"] == 2
    assert "snip/adopt/status" not in row
    assert [row[f"snip/gemms/{name}"] for name in ("fp8", "fp4", "bf16")] == [1, 4, 1]
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/snip/*.json")
    assert json.loads(table.read_text()) == {
        "columns": ["linear", "fprop", "dgrad", "wgrad"],
        "data": [[LINEARS[0], "fp8", "fp4", "bf16"], [LINEARS[1], "fp4", "fp4", "fp4"]],
    }


def test_never_ahead_of_megatron(offline, tmp_path):
    sink = WandbSink(offline)
    for step in range(3):
        sink.begin_step(step)
        sink.event(step, "collect", seconds=0.1)
        sink.metric(step, fp4_fraction=0.5)  # before Megatron's log of the same iteration
        offline.log({"lm loss": 1.0}, step + 1)
    assert [step for step, row in rows_of(tmp_path).items() if "lm loss" in row] == [1, 2, 3]


def test_no_second_run(offline, tmp_path):
    sink = WandbSink(offline)
    sink.metric(0, fp4_fraction=0.5)
    sink.precision_map(1, PrecisionMap.uniform(LINEARS, Format.FP4))
    wandb.finish()
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 1


def test_a_dead_run_is_reported_once_and_given_up(offline, capsys):
    sink = WandbSink(wandb.run)
    wandb.finish()
    for step in range(GIVE_UP_AFTER + 2):
        assert sink.active == (step < GIVE_UP_AFTER)
        sink.metric(step, fp4_fraction=0.5)
    assert capsys.readouterr().err.count("snip: wandb:") == 1
    assert sink.last_error


def test_without_a_writer_nothing_happens():
    sink = WandbSink(None)
    sink.metric(0, fp4_fraction=0.5)
    sink.event(0, "adopt", version=1)
    sink.precision_map(0, PrecisionMap(choices={}))
    assert not sink.active
    assert sink.last_error is None

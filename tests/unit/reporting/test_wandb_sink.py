"""The wandb sink against real wandb in offline mode, read back from the run's file."""

from __future__ import annotations

import math

import pytest
from wandb_file import history

from snip_megatron.precision import PrecisionMap
from snip_megatron.reporting.sinks import GIVE_UP_AFTER, WandbSink

wandb = pytest.importorskip("wandb")


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

"""The sinks against a real SummaryWriter and real wandb in offline mode, read back from their files."""

import math

import pytest

from snip_megatron.reporting.sinks import MAX_FAILURES, Sinks

pytest.importorskip("tensorboard")
wandb = pytest.importorskip("wandb")


@pytest.fixture
def writer(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(log_dir=str(tmp_path)) as writer:
        yield writer


def read(writer):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer.flush()
    return EventAccumulator(writer.log_dir).Reload()


def test_scalars_stand_at_megatrons_iterations(writer):
    sink = Sinks(tensorboard=writer)
    for step in range(3):
        sink.begin_step(step)
        sink.event(step, "probe", kind="statistics", seconds=0.25, wait_s=None)
        sink.metric(step, fp4_fraction=step / 4, grad_norm=math.nan, loss=None)
    sink.event(2, "adopt", version=2, status="optimal", achieved_per_stage={"0": 0.5, "1": 0.25}, changed=True)
    log = read(writer)
    assert [(e.step, e.value) for e in log.Scalars("snip/fp4_fraction")] == [(1, 0.0), (2, 0.25), (3, 0.5)]
    assert [(e.step, e.value) for e in log.Scalars("snip/probe/statistics/seconds")] == [(s, 0.25) for s in range(3)]
    assert [(e.step, e.value) for e in log.Scalars("snip/adopt/achieved_per_stage/1")] == [(2, 0.25)]
    assert not {name for name in log.Tags()["scalars"] if name.endswith(("loss", "norm", "status", "changed"))}


class Broken:
    attempts = 0

    def log(self, *_, **__):
        self.attempts += 1
        raise OSError("disk full")


def test_a_broken_log_is_reported_once_and_given_up_and_harms_no_other_sink(writer, capsys):
    broken = Broken()
    sinks = Sinks(wandb=broken, tensorboard=writer)
    for step in range(MAX_FAILURES + 2):
        sinks.metric(step, fp4_fraction=0.5)
    assert broken.attempts == MAX_FAILURES
    assert capsys.readouterr().err == "snip: wandb: disk full; training goes on without these figures\n"
    assert len(read(writer).Scalars("snip/fp4_fraction")) == MAX_FAILURES + 2


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """The wandb module with an open offline run, as Megatron's ``get_wandb_writer()`` returns it."""
    for name, value in {"MODE": "offline", "SILENT": "true", "DISABLE_CODE": "true", "DISABLE_GIT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    run = wandb.init(dir=tmp_path, project="snip", name="test", settings=wandb.Settings(x_disable_stats=True))
    yield wandb
    run.finish()


def test_a_dead_run_is_reported_once(offline, capsys):
    sink = Sinks(wandb=wandb.run)
    wandb.finish()
    for step in range(MAX_FAILURES):
        sink.metric(step, fp4_fraction=0.5)
    assert capsys.readouterr().err.count("snip: wandb:") == 1

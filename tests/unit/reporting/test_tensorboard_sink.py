"""The TensorBoard sink against a real SummaryWriter, read back from its event file."""

from __future__ import annotations

import math

import pytest

from snip_megatron.precision import PrecisionMap
from snip_megatron.reporting.sinks import GIVE_UP_AFTER, Sinks, TensorBoardSink, WandbSink

pytest.importorskip("tensorboard")


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
    sink = TensorBoardSink(writer)
    for step in range(3):
        sink.begin_step(step)
        sink.event(step, "probe", kind="statistics", seconds=0.25, wait_s=None)
        sink.metric(step, fp4_fraction=step / 4, grad_norm=math.nan, loss=None)
    sink.event(2, "adopt", version=2, status="optimal", achieved_per_stage={"0": 0.5, "1": 0.25}, changed=True)
    log = read(writer)
    assert sink.last_error is None
    assert [(e.step, e.value) for e in log.Scalars("snip/fp4_fraction")] == [(1, 0.0), (2, 0.25), (3, 0.5)]
    assert [(e.step, e.value) for e in log.Scalars("snip/probe/statistics/seconds")] == [(s, 0.25) for s in range(3)]
    assert [(e.step, e.value) for e in log.Scalars("snip/adopt/achieved_per_stage/1")] == [(2, 0.25)]
    assert not {name for name in log.Tags()["scalars"] if name.endswith(("loss", "norm", "status", "changed"))}


class Broken:
    def add_scalar(self, *_):
        raise OSError("disk full")


def test_a_broken_log_is_said_once_given_up_and_harms_no_other_sink(writer, capsys):
    broken, works = TensorBoardSink(Broken()), TensorBoardSink(writer)
    sinks = Sinks(broken, WandbSink(None), works)
    for step in range(GIVE_UP_AFTER + 2):
        assert broken.active == (step < GIVE_UP_AFTER)
        sinks.metric(step, fp4_fraction=0.5)
    assert capsys.readouterr().err == "snip: TensorBoard: disk full; training goes on without these figures\n"
    assert len(read(writer).Scalars("snip/fp4_fraction")) == GIVE_UP_AFTER + 2


def test_without_a_writer_nothing_happens():
    sink = TensorBoardSink(None)
    sink.metric(0, fp4_fraction=0.5)
    sink.precision_map(0, PrecisionMap(choices={}))
    assert not sink.active
    assert sink.last_error is None

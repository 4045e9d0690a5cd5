"""The TensorBoard sink against a real SummaryWriter, read back from its event file."""

from __future__ import annotations

import math

import pytest

from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.reporting.sinks import GIVE_UP_AFTER, Sinks
from snip_megatron.reporting.tensorboard_sink import TensorBoardSink
from snip_megatron.reporting.wandb_sink import WandbSink

pytest.importorskip("tensorboard")

LINEARS = ["decoder.layers.0.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc2"]


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


def test_validations_of_the_map_and_in_bf16_are_two_scalars(writer):
    sink = TensorBoardSink(writer)
    for formats, loss in (("map", 3.0), ("bf16", 2.0)):
        sink.event(4, "validation", formats=formats, loss=loss)
    log = read(writer)
    for formats, loss in (("map", 3.0), ("bf16", 2.0)):
        assert [(e.step, e.value) for e in log.Scalars(f"snip/validation/{formats}/loss")] == [(4, loss)]


def test_the_map_is_a_table(writer):
    choices = {f"{LINEARS[0]}:fprop": Format.FP8, f"{LINEARS[0]}:dgrad": Format.FP4, LINEARS[1]: Format.FP4}
    TensorBoardSink(writer).precision_map(8, PrecisionMap(choices=choices, solve_seconds=0.5))
    log = read(writer)
    (table,) = log.Tensors("snip/map/text_summary")
    assert table.step == 8
    assert table.tensor_proto.string_val[0].decode().splitlines() == [
        "| linear | fprop | dgrad | wgrad |",
        "| --- | --- | --- | --- |",
        f"| {LINEARS[0]} | fp8 | fp4 | bf16 |",
        f"| {LINEARS[1]} | fp4 | fp4 | fp4 |",
    ]
    counts = {name: log.Scalars(f"snip/gemms/{name}")[0].value for name in ("fp8", "fp4", "bf16")}
    assert counts == {"fp8": 1, "fp4": 4, "bf16": 1}
    assert log.Scalars("snip/solve/seconds")[0].value == 0.5


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

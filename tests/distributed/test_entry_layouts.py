"""The training entry on real gloo ranks: parallel layouts train, and agree where they should."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from launch import tiny_llama_args
from traced_pretrain import read_traces
from warm_ranks import WarmRanks

STEPS = 5


def train(warm: WarmRanks, tmp: Path, nproc: int, *extra: str, iters: int = STEPS, **env: str) -> list[dict[str, Any]]:
    trace = tmp / "trace"
    args = tiny_llama_args(*extra, iters=iters)
    process = warm.run(nproc, args, module="traced_pretrain", tmp=tmp, env={"TRACE": str(trace), **env})
    assert process.returncode == 0, process.stderr[-4000:]
    return read_traces(trace)


def loss_curve(traces: list[dict[str, Any]]) -> list[float]:
    """Losses of the last pipeline stage's ranks, which must all report the same."""
    curves = {tuple(t["losses"].items()) for t in traces if t["losses"]}
    assert len(curves) == 1
    return [float.fromhex(value) for _, value in sorted(curves.pop())]


def assert_learns(curve: list[float]) -> None:
    assert len(curve) == STEPS
    assert all(map(math.isfinite, curve))
    assert curve[-1] < curve[0] - 0.2


@pytest.fixture(scope="module")
def world_1(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train(warm, tmp_path_factory.mktemp("world_1"), 1)


def test_world_1_learns(world_1: list[dict[str, Any]]) -> None:
    assert_learns(loss_curve(world_1))
    assert all(s["after"]["range"] == [0, s["after"]["numel"]] for s in world_1[0]["shards"].values())


def test_tensor_and_sequence_parallel_is_world_1(
    warm: WarmRanks, world_1: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Weights start equal (initialised as a whole on the CPU), so losses and the norms' gradients must be equal."""
    traces = train(warm, tmp_path, 2, "--tensor-model-parallel-size", "2", "--sequence-parallel", PROBE_STEP="3")
    assert loss_curve(traces) == pytest.approx(loss_curve(world_1), rel=1e-5)
    expected = world_1[0]["norm_grads"]
    assert len(expected) == 9
    for trace in traces:
        assert trace["norm_grads"].keys() == expected.keys()
        for name, gradient in expected.items():
            assert trace["norm_grads"][name] == pytest.approx(gradient, rel=1e-3, abs=1e-6), name
        assert trace["groups"] | {"tp": 2, "dp_cp": 1} == trace["groups"]


def test_tensor_by_pipeline_parallel_bf16(warm: WarmRanks, tmp_path: Path) -> None:
    traces = train(
        warm, tmp_path, 4, "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--bf16"
    )
    assert_learns(loss_curve(traces))
    assert [bool(t["losses"]) for t in traces] == [False, False, True, True]
    for trace in traces:
        check_shards([trace])
        assert trace["groups"] | {"tp": 2, "dp_cp": 1} == trace["groups"]


def test_virtual_pipeline_and_probe(warm: WarmRanks, tmp_path: Path) -> None:
    """The peeked batches of interleaved chunks are the same in both of the probe's passes; shards with one DP rank."""
    layout = ("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2")
    traces = train(warm, tmp_path, 2, *layout, "--bf16", "--use-distributed-optimizer", PROBE_STEP="2")
    assert_learns(loss_curve(traces))
    first, second = traces[1]["probe_losses"]
    assert first == second != 0.0
    for trace in traces:
        check_shards([trace])


def check_shards(data_parallel: list[dict[str, Any]]) -> None:
    """The shards of data-parallel peers tile each parameter; values are the parameter's and its gradient's."""
    names = {name for trace in data_parallel for name in trace["shards"]}
    assert names
    for name in names:
        held = [s for trace in data_parallel if (s := trace["shards"][name])["after"] is not None]
        ranges = sorted(shard["after"]["range"] for shard in held)
        assert ranges[0][0] == 0
        assert ranges[-1][1] == held[0]["after"]["numel"]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges)), (name, ranges)
        for shard in held:
            before, after = shard["before"], shard["after"]
            assert before["step"] == 0
            assert not before["has_moments"]
            assert after["step"] == 1
            assert before["main_is_param"]
            assert after["main_is_param"]
            assert after["moments_are_gradient"], name
            assert after["hyper"][:3] == [0.9, 0.999, 1e-8]
            assert after["hyper"][3] == (0.0 if "layernorm" in name else 0.1)

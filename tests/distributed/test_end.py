"""The end of the entry: process groups are destroyed, except those whose collectives may be in CUDA graphs."""

import shlex
from pathlib import Path

import pytest
from launch import tiny_llama_args
from warm_ranks import WarmRanks


@pytest.mark.parametrize(
    ("graphs", "left"),
    [
        ("--cuda-graph-impl none", False),
        ("--cuda-graph-impl transformer_engine", True),
    ],
)
def test_process_groups_of_cuda_graphs_are_left(warm: WarmRanks, tmp_path: Path, graphs: str, left: bool) -> None:
    """Without its steps, which capture on a GPU alone, a run with graphs is the same on the CPU.

    On a GPU, NCCL would wait for the graphs, which live as long as the process, and the run would not end.
    """
    done = warm.succeed(
        1, tiny_llama_args("--skip-train", *shlex.split(graphs)), module="altered_pretrain", tmp=tmp_path
    )
    assert "skipping training (--skip-train is on)" in done.stdout
    assert f"process groups left: {left}" in done.stdout

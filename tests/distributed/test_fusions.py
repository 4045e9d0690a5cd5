"""Trainings with SwiGLU fused into quantisation have the bits of trainings without, on every layout."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from checkpoints import differences, read_checkpoint
from launch import tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.records.readers import read_events, read_metrics

STEPS = 6
COMMON = shlex.split(
    "--num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --seq-length 128 --max-position-embeddings 128 --bf16"
    " --global-batch-size 4 --snip --snip-gemm hopper --snip-budget fp4=0.5 --snip-first-update 1"
    " --snip-update-interval 3 --snip-lag 1 --snip-wait 240 --eval-iters 1 --eval-interval 4"
)
LAYOUTS = {
    "tensor": "--micro-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel --snip-communication gather",
    "tensor, one scale": "--micro-batch-size 2 --tensor-model-parallel-size 2 --snip-formats fp8_tensor,fp4"
    " --snip-policy uniform-fp8",
    "data": "--micro-batch-size 1 --use-distributed-optimizer --overlap-grad-reduce --recompute-granularity full"
    " --recompute-method uniform --recompute-num-layers 1",
}
RARE = {
    "pipeline": "--micro-batch-size 1 --pipeline-model-parallel-size 2 --snip-formats fp8,fp4,fp8_tensor",
    "mlp": "--micro-batch-size 1 --recompute-granularity selective --recompute-modules mlp",
}


def train(warm: WarmRanks, folder: Path, fusions: str, arguments: str) -> tuple[list[Any], Any, str]:
    run, saved = folder / fusions, folder / f"{fusions}-saved"
    own = ("--snip-fusions", fusions, "--snip-dir", str(run), "--save", str(saved), "--save-interval", "3")
    given = tiny_llama_args(*COMMON, *shlex.split(arguments), *own, iters=STEPS)
    done = warm.run(2, given, module="fused_pretrain", tmp=folder / f"{fusions}-ranks", timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [event["step"] for event in read_events(run) if event["event"] == "adopt"] == (
        [0] if "uniform-fp8" in arguments else [2, 5]
    )
    figures = [(row["step"], row["loss"], row["grad_norm"]) for row in read_metrics(run)]
    return figures, read_checkpoint(saved, STEPS), done.stdout


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.matrix) for name in RARE)])
def test_bits_are_those_without_fusions(warm: WarmRanks, tmp_path: Path, layout: str) -> None:
    arguments = (LAYOUTS | RARE)[layout]
    plain, plain_saved, said = train(warm, tmp_path, "none", arguments)
    assert "fused with quantisation" not in said
    assert "fused calls: []" in said
    fused, fused_saved, said = train(warm, tmp_path, "auto", arguments)
    assert "snip: fused with quantisation: SwiGLU of" in said
    one_scale = layout == "tensor, one scale"
    calls = ("swiglu_gradient_with_amax", "swiglu_with_amax", "quantize_swiglu", "quantize_swiglu_gradient")
    assert f"fused calls: {sorted(calls[:2] if one_scale else calls[2:])}" in said
    assert [step for step, _, _ in fused] == list(range(STEPS))
    assert fused == plain
    assert differences(fused_saved, plain_saved) == []

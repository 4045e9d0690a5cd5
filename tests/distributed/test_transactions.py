"""An update that fails on one rank, in any of its parts: all ranks drop it, and training keeps its bits."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from checkpoints import differences, read_checkpoint
from launch import error_lines, tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.planner.layout import Layout
from snip_megatron.planner.models import Llama
from snip_megatron.planner.updates import probe_passes
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.exchange import EXIT_UPDATE_BROKEN
from snip_megatron.runtime.run_data import read_events

# Dropout, so that a lost or shifted random state shows.
DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")
FIRST, INTERVAL, LAG = 2, 3, 1
SNIP = shlex.split(
    "--snip --snip-estimator noise --snip-budget fp4=0 --snip-pin *=bf16 --snip-wait 120"
    f" --snip-settings probe_tokens=48 --snip-first-update {FIRST} --snip-update-interval {INTERVAL} --snip-lag {LAG}"
)
PROBE, RECORDER = "snip_megatron.runtime.probe", "snip_megatron.sensitivity.recorder"
PARTS = [
    ("memory", f"{PROBE}:ProbeRunner.check_memory"),
    ("preparation", f"{PROBE}:Passes.prepare"),
    ("statistics", "snip_megatron.megatron.host:MegatronStep.prepare"),
    ("statistics", f"{RECORDER}:LinearRecorder._record"),
    ("statistics", f"{RECORDER}:Boundary._on_forward"),
    ("statistics", f"{RECORDER}:Boundary._on_gradient"),
    ("reduction", f"{PROBE}:Passes.fill_table"),
    ("weight_divergence", f"{PROBE}:Passes.add_linear"),
    ("weight_divergence", "snip_megatron.megatron.compat:update_of"),
    ("forward_noise", f"{RECORDER}:LinearRecorder._compare"),
    ("submission", "snip_megatron.runtime.coordinator:RankZeroCoordinator.submit"),
]
NOISE = ("forward_noise", "snip_megatron.runtime.residual_stream:ResidualStream._draw")
FORWARD = ("statistics", "snip_megatron.megatron.entry:loss_function")
PLACES = {
    "tensor-pipeline": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --bf16",
        [*PARTS, NOISE],
    ),
    # All that routers keep between forwards: jitter, biases, tokens counted for two of three auxiliary losses.
    "expert-parallel": (
        2,
        "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 96"
        " --moe-layer-freq [0,1,1,0] --moe-token-dispatcher-type alltoall --moe-input-jitter-eps 0.05"
        " --moe-router-enable-expert-bias --moe-router-score-function sigmoid --moe-z-loss-coeff 0.001"
        " --moe-router-load-balancing-type aux_loss global_aux_loss --moe-aux-loss-coeff 0.01 0.01"
        " --moe-expert-capacity-factor 1.25",
        [PARTS[1], PARTS[3], PARTS[6], PARTS[7], NOISE],
    ),
    # Two microbatches on each rank: gradients are reduced after the last one.
    "distributed-optimizer": (
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --micro-batch-size 1",
        [PARTS[0], FORWARD, PARTS[8], PARTS[10]],
    ),
}


def printed_losses(process: subprocess.CompletedProcess[str]) -> dict[int, str]:
    """Step (from 1) → everything that Megatron prints of losses, auxiliary ones of experts included."""
    return {int(s): text for s, text in re.findall(r"iteration +(\d+)/.*?\| (lm loss: .*?) \| loss sc", process.stdout)}


def failing(warm: WarmRanks, tmp: Path, failures: list[Any], ranks: int, args: list[str], **more: str) -> Any:
    environment = {"ALTER": "fail", "FAIL": json.dumps(failures), **more}
    return warm.succeed(ranks, args, module="altered_pretrain", env=environment, tmp=tmp)


@pytest.mark.parametrize("place", PLACES)
def test_an_update_that_fails_anywhere_on_one_rank_is_dropped_and_tried_again(
    warm: WarmRanks, tmp_path: Path, place: str
) -> None:
    """All that is printed and all that the checkpoint holds is bitwise that of the training without SNIP."""
    ranks, layout, parts = PLACES[place]
    failures = [
        (FIRST + i * INTERVAL, 0 if part in ("submission", "forward_noise") else i % ranks, target, "RuntimeError")
        for i, (part, target) in enumerate(parts)
    ]
    end = FIRST + len(parts) * INTERVAL
    # Maps are measured: a forward fails, or what precedes it where ranks wait for each other inside one.
    forward = FORWARD[1] if place == "distributed-optimizer" else "snip_megatron.megatron.host:MegatronStep.prepare"
    failures.append((end + LAG, 1, forward, "RuntimeError"))
    steps = end + INTERVAL + 1
    saving = ["--save-interval", str(steps), "--num-layers", "2" if "--num-experts" not in layout else "4"]
    if place == "distributed-optimizer":
        saving.append("--dist-ckpt-optim-fully-reshardable")

    def arguments(name: str, *extra: str) -> list[str]:
        return tiny_llama_args(*DROPOUT, *layout.split(), *saving, "--save", str(tmp_path / name), *extra, iters=steps)

    failed = failing(warm, tmp_path / "failing", failures, ranks, arguments("saved", *SNIP))
    plain = warm.succeed(ranks, arguments("plain"), tmp=tmp_path / "undisturbed")
    events = list(read_events(tmp_path / "saved" / "snip"))
    dropped = [(e["step"], e["part"], e["rank"], e["until"]) for e in events if e["event"] == "dropped"]
    parts.append(("rise", ""))
    expected = [(f[0], part[0], f[1], f[0] + LAG) for f, part in zip(failures, parts, strict=True)]
    assert dropped == expected
    submitted = [f[0] + LAG for f in failures]
    assert [e["step"] for e in events if e["event"] == "submit"] == [*submitted[:-1], end, submitted[-1]]
    assert all(f"the update of step {f[0]} is dropped: rank {f[1]} on " in failed.stdout for f in failures)
    assert printed_losses(failed) == printed_losses(plain)
    assert len(printed_losses(plain)) == steps
    assert differences(*(read_checkpoint(tmp_path / name, steps) for name in ("plain", "saved"))) == []


def test_a_probe_without_memory_takes_half_of_its_sequences_next_time(warm: WarmRanks, tmp_path: Path) -> None:
    sizes = ["--micro-batch-size", "4", "--global-batch-size", "4", "--pipeline-model-parallel-size", "2"]
    args = tiny_llama_args(*sizes, *SNIP, "--snip-dir", str(tmp_path / "run"), iters=8)
    record = f"{RECORDER}:LinearRecorder._record"
    failing(warm, tmp_path, [(FIRST, 1, record, "OutOfMemoryError")], 2, args)
    events = list(read_events(tmp_path / "run"))
    assert [(e["step"], e["error"]) for e in events if e["event"] == "dropped"] == [(FIRST, "OutOfMemoryError")]
    probes = [(e["step"], e["tokens"]) for e in events if e["event"] == "probe" and e["kind"] == "statistics"]
    assert probes == [(FIRST + LAG, 2 * 64), (FIRST + INTERVAL, 2 * 64)]
    # The passes are those that snip plan counts.
    tiny = Llama("tiny", 4, 64, 192, 4, 2, 16, vocabulary=255, context=64).model(2)
    planned = probe_passes(Layout(tiny, 1, 2, 1, 1, 64, 4, 4), SnipConfig(enabled=True, estimator="noise"))
    probed = [e for e in events if e["event"] == "probe" and e["step"] == FIRST + LAG]
    assert planned == {e["kind"]: e["passes"] for e in probed}


def test_statistics_that_overflow_in_fp16_are_measured_again_a_lag_later(warm: WarmRanks, tmp_path: Path) -> None:
    """Megatron lowers the scale of the loss meanwhile. The next update would be 1,000 steps later."""
    snip = [each if each != str(INTERVAL) else "1000" for each in SNIP]
    fp16 = ["--fp16", "--initial-loss-scale", "1.6e7", "--hysteresis", "1"]
    args = tiny_llama_args(*fp16, *snip, "--num-layers", "2", "--snip-dir", str(tmp_path / "run"), iters=10)
    warm.succeed(1, args, tmp=tmp_path)
    events = list(read_events(tmp_path / "run"))
    steps = [e["step"] for e in events if e["event"] in ("dropped", "submit")]
    assert len(steps) > 1
    assert [e["reason"].partition(":")[0] for e in events if e["event"] == "dropped"] == ["not finite"] * len(steps[1:])
    assert steps == [*range(FIRST, FIRST + LAG * len(steps), LAG)]


def test_a_failure_where_other_ranks_wait_ends_the_job_in_one_line(warm: WarmRanks, tmp_path: Path) -> None:
    """The loss of the last pipeline stage fails while the first stage waits for its gradient."""
    args = tiny_llama_args("--pipeline-model-parallel-size", "2", *SNIP, "--snip-dir", str(tmp_path / "run"), iters=8)
    code = tmp_path / "code"
    environment = {
        "ALTER": "fail",
        "FAIL": json.dumps([(FIRST, 1, FORWARD[1], "OutOfMemoryError")]),
        "SNIP_EXIT_CODE_FILE": str(code),
    }
    ended = warm.run(2, args, module="altered_pretrain", env=environment, tmp=tmp_path, grace=2.0)
    assert ended.returncode != 0
    (line,) = error_lines(ended)
    assert "rank 1 on " in line
    assert ", statistics: OutOfMemoryError: injected into loss_function" in line
    assert int(code.read_text()) == EXIT_UPDATE_BROKEN

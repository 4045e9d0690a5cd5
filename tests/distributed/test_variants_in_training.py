"""Variants of formats in whole runs through the real entry: measured, chosen, trained with, replayed, and refused."""

import shlex
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from launch import tiny_llama_args
from layouts import events
from warm_ranks import WarmRanks

from snip_megatron.precision import Format, Gemm
from snip_megatron.runtime.run_data import read_events, read_maps, read_metrics

STEPS, SAVED = 6, 4
CANDIDATES = "mxfp8,nvfp4,nvfp4_46,nvfp4_hadamard"
PINNED = "decoder.layers.1.mlp.linear_fc2:wgrad"
SNIP = shlex.split(
    f"--snip --snip-pin {PINNED}=nvfp4_hadamard"
    f" --snip-formats {CANDIDATES} --snip-first-update 1 --snip-update-interval 100 --snip-lag 1 --snip-wait 240"
    " --snip-settings probe_tokens=32"
)
PARALLEL = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]


def train(warm: WarmRanks, tmp: Path, name: str, *extra: str) -> Path:
    run = tmp / name
    args = tiny_llama_args("--snip-dir", str(run), *PARALLEL, *extra, iters=STEPS)
    warm.succeed(2, args, tmp=tmp, timeout=300)
    return run


@pytest.fixture(scope="module")
def run(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("variants")
    return train(warm, tmp, "run", *SNIP, "--save", str(tmp / "saved"), "--save-interval", str(SAVED))


def test_nvidia_s_recipe_is_trained_with(warm: WarmRanks, tmp_path: Path) -> None:
    run = train(warm, tmp_path, "run", "--snip", "--snip-policy", "nvidia", "--snip-formats", "mxfp8,mxfp4")
    (used,) = read_maps(run).values()
    assert not [e for e in read_events(run) if e["event"] == "probe"]
    first = {
        (key.rpartition(":")[2], fmt.value) for key, fmt in used.choices.items() if key.startswith("decoder.layers.0.")
    }
    last = {fmt.value for key, fmt in used.choices.items() if key.startswith("decoder.layers.3.")}
    assert first == {("fprop", "mxfp4"), ("dgrad", "mxfp4"), ("wgrad", "mxfp4_hadamard")}
    assert last == {"bf16"}
    assert np.isfinite([figure["loss"] for figure in read_metrics(run)]).all()


def test_the_program_takes_variants_and_training_runs_under_them(run: Path) -> None:
    assert [e["step"] for e in events(run, "adopt")] == [2]
    (chosen,) = read_maps(run).values()
    assert chosen.status == "optimal"
    assert chosen.achieved is not None
    assert chosen.achieved >= 0.75
    count = Counter((key.rpartition(":")[2], fmt) for key, fmt in chosen.choices.items())
    assert all(Gemm(gemm) in fmt.gemms for gemm, fmt in count)
    assert count["fprop", Format.NVFP4_46] > 0
    assert chosen.choices[PINNED] is Format.NVFP4_HADAMARD  # pinned, since errors alone may not choose it
    losses = [figure["loss"] for figure in read_metrics(run)]
    assert len(losses) == STEPS
    assert np.isfinite(losses).all()


def test_a_resume_draws_the_same_signs_and_numbers(run: Path, warm: WarmRanks, tmp_path: Path) -> None:
    """The checkpoint lies under the map, so that the signs of the steps after it are those of the uninterrupted run."""
    load = ("--load", str(run.parent / "saved"), "--ckpt-step", str(SAVED))
    resumed = train(warm, tmp_path, "resumed", *SNIP, *load)
    expected = [figure["loss"] for figure in read_metrics(run) if figure["step"] >= SAVED]
    assert len(expected) == STEPS - SAVED
    assert [figure["loss"] for figure in read_metrics(resumed)] == expected

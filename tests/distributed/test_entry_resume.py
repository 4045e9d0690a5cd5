"""Resuming with the distributed optimizer continues bit for bit; so does a step after a probe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch import tiny_llama_args
from test_entry_layouts import check_shards
from traced_pretrain import read_traces
from warm_ranks import WarmRanks

STEPS = 12
# Dropout, so that a lost random state shows.
ARGS = ("--use-distributed-optimizer", "--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--save-interval", "6")


def train(warm: WarmRanks, tmp: Path, name: str, *extra: str, **env: str) -> list[dict[str, Any]]:
    trace = tmp / name
    args = tiny_llama_args(*ARGS, *extra, iters=STEPS)
    process = warm.run(2, args, module="traced_pretrain", tmp=tmp, env={"TRACE": str(trace), **env})
    assert process.returncode == 0, process.stderr[-4000:]
    return read_traces(trace)


def test_resume_is_bitwise_in_both_formats(warm: WarmRanks, tmp_path: Path) -> None:
    """Uninterrupted; from step 6 (dp_reshardable, the default) to 9, with a probe; from 9 (fully_reshardable) to 12.

    Steps well after the load are compared: the first one says nothing about the optimizer.
    """
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    whole = train(warm, tmp_path, "whole", "--save", first)
    check_shards(whole)
    middle = train(
        warm,
        tmp_path,
        "middle",
        *("--load", first, "--ckpt-step", "6", "--save", second, "--exit-interval", "9"),
        "--dist-ckpt-optim-fully-reshardable",
        PROBE_STEP="8",
    )
    last = train(warm, tmp_path, "last", "--load", second, "--dist-ckpt-optim-fully-reshardable")
    for rank in range(2):
        assert sorted(middle[rank]["losses"]) == list(range(7, 10))
        assert sorted(last[rank]["losses"]) == list(range(10, 13))
        for part in (middle, last):
            for name in ("losses", "grad_norms"):
                for step, value in part[rank][name].items():
                    assert value == whole[rank][name][step], (name, step)
        assert last[rank]["weights"] == whole[rank]["weights"]
        assert middle[rank]["probe_losses"][0] == middle[rank]["probe_losses"][1] != 0.0


def test_a_state_of_other_parameters_is_refused(warm: WarmRanks, tmp_path: Path) -> None:
    """A plain run saves its optimizer state by position, and a run with another order of parameters loads it."""
    saved = str(tmp_path / "saved")
    args = tiny_llama_args("--bf16", "--use-distributed-optimizer", "--save", saved, "--save-interval", "4", iters=8)
    plain = warm.run(2, [*args, "--exit-interval", "4"], tmp=tmp_path / "plain")
    assert plain.returncode == 0, plain.stderr[-4000:]
    load = [*args, "--load", saved, "--snip", "--snip-policy", "bf16"]
    run = warm.run(2, load, module="reordered_pretrain", tmp=tmp_path / "refused")
    assert run.returncode != 0
    lines = {line for line in run.stderr.splitlines() if "optimizer state belongs to other parameters" in line}
    assert len(lines) in (1, 2), run.stderr[-4000:]  # two ranks may hold different parameters
    assert all("--no-load-optim" in line for line in lines)
    assert "iteration        5/" not in run.stdout
    afresh = warm.run(2, [*load, "--no-load-optim"], module="reordered_pretrain", tmp=tmp_path / "afresh")
    assert afresh.returncode == 0, afresh.stderr[-4000:]
    same_order = warm.run(2, load, tmp=tmp_path / "same")
    assert same_order.returncode == 0, same_order.stderr[-4000:]

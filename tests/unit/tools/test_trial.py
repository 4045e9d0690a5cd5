"""``snip trial``: which of a job's arguments each run gets, and what the verdict says about measured times."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from snip_megatron.precision.errors import SnipError
from snip_megatron.tools import trial
from snip_megatron.tools.trial import Machine, Map, Run, Trial

H200, CPU = Machine(1, "NVIDIA H200", (9, 0)), Machine(0)


def test_a_job_keeps_what_it_trains_and_loses_what_it_saves() -> None:
    job = shlex.split("""
    --num-layers 2 --lr 1e-4 --save /a --save-interval 5 --no-load-optim --load=/a --wandb-project p --train-iters 9
    --fp8-format hybrid --fp8-recipe blockwise --data-path .3 /x .7 /y --exit-interval 3 --cuda-graph-impl local
    --snip --snip-dir /r --snip-formats bf16,fp8 --snip-first-update 7 --snip-map m.json --eval-iters 4
    """)
    assert list(map(shlex.join, trial.split_arguments(job))) == [
        "--num-layers 2 --lr 1e-4 --data-path .3 /x .7 /y --cuda-graph-impl local",
        "--fp8-format hybrid --fp8-recipe blockwise",
        "--snip-formats bf16,fp8 --snip-map m.json",
    ]
    for words in ([], ["torchrun", "--nproc-per-node"]):
        with pytest.raises(SnipError, match="give the Megatron arguments of the job after --"):
            trial.split_arguments(words)


def test_megatrons_own_fp8_is_the_jobs_or_the_fastest_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial.importlib.util, "find_spec", lambda name: object())
    tensorwise = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"]
    assert trial.own_fp8([], [], H200) == ("Megatron's tensorwise FP8", tensorwise, "")
    assert trial.own_fp8([], [], Machine(1, "B200", (10, 0)))[1] == ["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"]
    named = ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise"]
    assert trial.own_fp8([], named, H200) == ("Megatron's blockwise FP8", named, "")
    assert trial.own_fp8([], [], CPU)[2] == "it needs a GPU"
    assert trial.own_fp8([], [], Machine(1, "A100", (8, 0)))[2] == "this card multiplies no FP8"
    assert "transformer_engine" in trial.own_fp8(["--transformer-impl", "local"], [], H200)[2]


def measured(bf16: float, fp8: float | None, snip: float, machine: Machine = H200) -> Trial:
    runs = tuple(
        Run(name, [], step_ms=[] if ms is None else [9e9] * 40 + [ms] * 20, losses=[1.0] * 60)
        for name, ms in (("bf16", bf16), ("Megatron's tensorwise FP8", fp8), ("--snip", snip))
    )
    return Trial((runs[0], runs[1], runs[2]), machine, 1, 60, (), 32768, 100_000)


QUICK = Map(17, {"fp8_tensor": 1.0}, 3.9)


@pytest.mark.parametrize(
    ("times", "chosen", "sentence"),
    [
        ((451.0, 370.0, 354.0), QUICK, "Worth it: --snip is 1.27 x as fast as bf16 and 1.05 x as fast as Megatron's"),
        ((451.0, 370.0, 370.0), QUICK, "No faster than Megatron's own: --snip is 1.22 x as fast as bf16 and 1.00 x"),
        ((451.0, 340.0, 370.0), QUICK, "Not worth it: --snip is 1.22 x as fast as bf16 and 0.92 x as fast as"),
        ((451.0, 440.0, 450.0), QUICK, "Not worth it: a step under --snip is not faster than in bf16 (1.00 x); if the"),
        ((451.0, None, 354.0), QUICK, "Worth it: --snip is 1.27 x as fast as bf16; of 100 GPU hours of this job of"),
        ((451.0, 370.0, 451.0), Map(17, {"bf16": 1.0}), "Not worth it: SNIP measured this job's GEMMs, and none is"),
        ((451.0, 370.0, 354.0), Map(45, {"fp8": 1.0}), "No verdict: the map was adopted at step 45 of 60 only"),
        ((451.0, 370.0, 451.0), Map(line="Because."), "No verdict: no map was adopted within 60 steps. Because."),
    ],
)
def test_verdict(times: tuple[float, float | None, float], chosen: Map, sentence: str) -> None:
    assert trial.verdict(measured(*times), chosen).startswith(sentence)


def test_the_table_has_a_row_for_each_run_and_the_result_their_figures() -> None:
    times = measured(400.0, 320.0, 300.0)
    failed = replace(times, runs=(times.runs[0], Run("fp8", [], error="boom"), times.runs[2]))
    lines = trial.table(failed, QUICK).splitlines()
    assert lines[0] == "60 steps on 1 × NVIDIA H200; medians of the last 20"
    assert lines[3].split() == ["bf16", "400.0", "ms", "81,920", "1.00", "1.0000"]
    assert lines[4].split() == ["fp8", "failed:", "boom"]
    assert lines[5].split() == ["--snip", "300.0", "ms", "109,227", "1.33", "1.0000"]
    assert lines[7] == "Map: 100% fp8_tensor, from step 17 on; its update cost 3.9 s."
    result = trial.as_dict(times, QUICK, "Yes.", ["snip", "trial"])
    assert (result["over_fp8"], result["runs"][2]["speedup"]) == (320 / 300, 400 / 300)


def test_a_log_has_steps_memory_and_an_error(tmp_path: Path) -> None:
    log = (
        " [x] iteration        1/      60 | consumed samples: 4 | elapsed time per iteration (ms): 512.5 | learning"
        " rate: 1e-4 | lm loss: 1.000000E+01 | loss scale: 1.0 |\n[Rank 0] (after 60 iterations) memory (MB) |"
        " allocated: 10.0 | max allocated: 2048.00 | reserved: 9.0 | max reserved: 9.0\n"
    )
    run = Run("bf16", [])
    run.read(log)
    assert (run.step_ms, run.losses, run.memory_bytes) == ([512.5], [10.0], 2**31)
    report = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n====\n"
    assert trial.last_error(f"{log}pretrain_gpt: --lr: no\nValueError: x\n{report}") == "pretrain_gpt: --lr: no"
    assert trial.last_error(f"[rank0]: ValueError: x\n{report}") == "ValueError: x"


def test_a_run_that_fails_or_stops_early_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real supervisor runs a script in torchrun's place."""
    for script, error in (
        ("print('ValueError: no'); raise SystemExit(1)", "ValueError: no"),
        ("print('it ends')", "it ends"),
        ("raise SystemExit(3)", "exit code 3 after 0 steps"),
    ):
        monkeypatch.setattr(trial.torchrun, "torchrun_command", lambda *_, s=script: [sys.executable, "-c", s])
        run = Run("bf16", [])
        assert trial.train(run, measured(1.0, None, 1.0, CPU), tmp_path / "log") is None
        assert run.error == error

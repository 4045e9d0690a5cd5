"""Wrong arguments: one clear line, a non-zero exit, nothing trained."""

import subprocess
from pathlib import Path

import pytest
from launch import error_lines, losses, tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.precision import PrecisionMap
from snip_megatron.runtime.run_data import read_config

# A map of a model with one more layer.
MAP = """{"schema": "snip.map/1", "choices": {"decoder.layers.4.mlp.linear_fc1": "fp4"}}"""


def test_what_each_rank_finds_is_one_line_over_all_ranks(warm: WarmRanks, tmp_path: Path) -> None:
    """test_agreed_start.py has what rank 0 alone finds."""
    (tmp_path / "map.json").touch()
    process = warm.run(2, tiny_llama_args("--snip", "--snip-map", "map.json"), tmp=tmp_path)
    message = "--snip-map map.json: not JSON: Expecting value: line 1 column 1 (char 0)"
    assert error_lines(process) == [f"pretrain_gpt: {message}"]
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--snip", "--snip-budget", "fp4=1.7"], "--snip-budget fp4=1.7: the share must be a number between 0 and 1"),
        (["--snip-no-compat", "cpu"], "no CUDA device is visible and --snip-no-compat cpu forbids running on the CPU"),
        (["--tensor-model-parallel-size", "2"], "Megatron refuses the arguments: world size (1) is not divisible"),
        (["--attention-backend", "local"], "Megatron refuses the arguments: TypeError: 'NoneType' object is not sub"),
        (["--non-persistent-ckpt-type", "local"], "Megatron refuses the arguments: nvidia_resiliency_ext is required "),
        (["--snip", "--snip-map", "map.json"], "--snip-map map.json: names decoder.layers.4.mlp.linear_fc1, which "),
    ],
)
def test_what_is_refused_beside_megatron_is_one_line(
    extra: list[str], message: str, warm: WarmRanks, tmp_path: Path
) -> None:
    (tmp_path / "map.json").write_text(MAP)
    saving = ("--save", "checkpoint", "--save-interval", "1")
    process = warm.run(1, tiny_llama_args(*extra, *saving), tmp=tmp_path)
    check_refusal(process, message)
    assert {path.name for path in tmp_path.iterdir()} == {"map.json", "rank0.out", "rank0.err"}  # nothing is written


def test_what_is_frozen_stays_as_it_is_and_the_rest_is_measured(warm: WarmRanks, tmp_path: Path) -> None:
    """The embedding, the first layer and another linear and norm: nothing below the second layer has a gradient."""
    snip = ("--snip", "--snip-budget", "fp4=0.4", "--snip-first-update", "1", "--snip-lag", "1", "--snip-wait", "120")
    args = tiny_llama_args(*snip, "--snip-dir", "run", iters=4)
    parts = "word_embeddings,decoder.layers.0.,decoder.layers.2.mlp.linear_fc1,decoder.layers.3.input_layernorm"
    process = warm.succeed(1, args, tmp=tmp_path, module="altered_pretrain", env={"FROZEN": parts})
    stays = "decoder.layers.*.mlp.linear_fc1 of 2 layers stays bf16 (frozen)"
    assert f"snip: {stays}" in process.stdout
    assert stays in read_config(tmp_path / "run")["facts"]["stays_bf16"]
    (path,) = (tmp_path / "run" / "maps").glob("step_*.json")
    result = {str(linear) for linear in PrecisionMap.from_json(path.read_text()).linears()}
    assert "decoder.layers.2.mlp.linear_fc1" not in result
    assert len(result) == 11


def test_a_schedule_that_megatron_refuses_is_one_line(warm: WarmRanks, tmp_path: Path) -> None:
    """The schedule differs from the checkpoint's. The line names the argument that keeps the new one."""
    refused = "Megatron refuses the learning rate's schedule: "
    warm.succeed(1, tiny_llama_args("--save", "saved", "--save-interval", "3", iters=3), tmp=tmp_path)
    longer = tiny_llama_args("--load", "saved", "--snip", iters=5)
    process = warm.run(1, longer, tmp=tmp_path)
    (line,) = error_lines(process)
    assert line.startswith(f"pretrain_gpt: {refused}OptimizerParamScheduler: class input value 20 and checkpoint")
    assert "--override-opt-param-scheduler keeps this one" in line
    assert (process.returncode, "Traceback" in process.stderr, losses(process)) == (2, False, {})
    process = warm.succeed(1, [*longer, "--override-opt-param-scheduler"], tmp=tmp_path)
    assert list(losses(process)) == [4, 5]


def test_help_lists_megatrons_arguments_and_snips(warm: WarmRanks, tmp_path: Path) -> None:
    process = warm.succeed(1, ["--help"], tmp=tmp_path)
    assert {"--num-layers", "--snip-budget"} <= set(process.stdout.split())


def test_a_training_that_no_launcher_started_is_one_line(warm: WarmRanks, tmp_path: Path) -> None:
    process = warm.run(1, tiny_llama_args(iters=2), tmp=tmp_path, env={"MASTER_ADDR": ""})
    check_refusal(process, "a launcher must start this: torchrun --nproc-per-node 1 -m snip_megatron.pretrain_gpt")


def check_refusal(process: subprocess.CompletedProcess[str], message: str) -> None:
    assert process.returncode == 2
    (line,) = error_lines(process)
    assert line.startswith(f"pretrain_gpt: {message}")
    assert "Traceback" not in process.stderr
    assert "iteration" not in process.stdout.split("arguments ---")[-1].split("end of arguments")[-1]

"""Every configuration through Megatron's own argument validation, and SNIP's, with its whole world size."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from snip_megatron.tools.launch import CONFIGURATIONS, Job, make_job, megatron_arguments

REPOSITORY = Path(__file__).resolve().parents[3]
CHANGED: dict[str, dict[str, Any]] = {  # what a user may change, too
    "8b": {"name": "7b", "model": "8b", "tp": 2, "micro_batch_size": 1, "recompute": "full"},
    "405b": {"name": "70b", "model": "405b", "tp": 8, "pp": 2, "nodes": 16, "global_batch_size": 64},
    "plain": {"name": "1b", "snip": False, "extra": ("--train-iters", "7", "--lr", "1e-4")},
}

VALIDATE = """
import argparse, json, os, sys
from snip_megatron.megatron.startup import Startup, prepare
prepare([], [])
import megatron.training.arguments as arguments
from snip_megatron.runtime.config import add_arguments, resolve_arguments
from snip_megatron.megatron import validate
found = {}
for name, (world, words) in json.load(sys.stdin).items():
    os.environ |= {"WORLD_SIZE": str(world), "RANK": "0"}
    sys.argv = ["pretrain_gpt", *words]
    args = arguments.parse_args(add_arguments)
    arguments.validate_args(args)
    config = resolve_arguments(args)
    # Not on the CPU, where the vocabulary is padded when the tokenizer is built.
    args.padded_vocab_size = args.vocab_size + 1
    if config.enabled:
        validate.check(config, args)
    found[name] = {k: v for k, v in vars(args).items() if isinstance(v, (int, float, str, bool, type(None)))}
print("RESULT" + json.dumps(found))
"""


def jobs() -> dict[str, Job]:
    arguments = {name: {"name": name} for name in CONFIGURATIONS} | CHANGED
    return {name: make_job(**each, data="mock", save=Path("/nowhere/checkpoints")) for name, each in arguments.items()}


@pytest.fixture(scope="module")
def validated() -> dict[str, dict[str, Any]]:
    asked = {name: (job.layout.ranks, megatron_arguments(job)) for name, job in jobs().items()}
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, "-c", VALIDATE],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=300,
        env=environment | {"PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.rpartition("RESULT")[2])
    return found


@pytest.mark.parametrize("name", [*CONFIGURATIONS, *CHANGED])
def test_megatron_reads_what_the_planner_plans(name: str, validated: dict[str, dict[str, Any]]) -> None:
    args, job = validated[name], jobs()[name]
    layout, model = job.layout, job.model
    expected = {
        "num_layers": model.blocks,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.heads,
        "num_query_groups": model.groups if model.groups != model.heads else 1,
        "group_query_attention": model.groups != model.heads,
        "kv_channels": model.head_size,
        "seq_length": layout.seq_length,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "data_parallel_size": layout.dp,
        "sequence_parallel": layout.tp > 1,
        "micro_batch_size": layout.micro_batch_size,
        "global_batch_size": layout.global_batch_size,
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "bf16": True,
        "use_distributed_optimizer": True,
        "overlap_param_gather": True,
        "exit_signal_handler": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "transformer_impl": "transformer_engine",
        "snip": name != "plain",
        "recompute_granularity": None if layout.recompute == "none" else layout.recompute,
        "load": "/nowhere/checkpoints",
        "save": "/nowhere/checkpoints",
    }
    if model.groups == model.heads:
        expected.pop("num_query_groups")  # whatever it is, it is not used
    assert {key: args[key] for key in expected} == expected


def test_constants_of_the_models(validated: dict[str, dict[str, Any]]) -> None:
    constants = {name: (args["layernorm_epsilon"], args["rotary_base"]) for name, args in validated.items()}
    assert constants["1b"] == (1e-5, 10_000)
    assert constants["3b"] == constants["7b"] == (1e-6, 10_000)
    assert constants["70b"] == constants["70b-pp8"] == constants["8b"] == constants["405b"] == (1e-5, 500_000)


def test_the_users_arguments_come_last_and_win(validated: dict[str, dict[str, Any]]) -> None:
    assert (validated["plain"]["train_iters"], validated["plain"]["lr"]) == (7, 1e-4)
    tokens = validated["1b"]["train_iters"] * 1024 * 2048
    assert tokens == pytest.approx(3e12, rel=1e-6)

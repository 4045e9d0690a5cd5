"""Jobs of ``snip launch``: sizes, data and checkpoints, and the arguments as Megatron and SNIP validate them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusal import refusal

from snip_megatron.precision.errors import SnipError
from snip_megatron.tools.launch import CONFIGURATIONS, Job, last_value, make_job, megatron_arguments, progress


def job(**changes: Any) -> Any:
    return make_job(**({"name": "1b", "data": "mock", "save": Path("/nowhere/c")} | changes))


def value(words: list[str], name: str) -> str | None:
    return words[words.index(name) + 1] if name in words else None


def prepared(folder: Path, *without: str) -> Path:
    for name in ("train.idx", "train.bin", "valid.idx", "valid.bin"):
        if name not in without:
            (folder / name).write_bytes(b"")
    if "tokenizer" not in without:
        (folder / "tokenizer").mkdir()
    return folder


@given(st.integers(1, 16), st.integers(1, 8), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8, 16]))
def test_every_gpu_has_a_rank(nodes: int, gpus_per_node: int, tp: int, pp: int) -> None:
    changes = {"name": "70b", "nodes": nodes, "gpus_per_node": gpus_per_node, "tp": tp, "pp": pp}
    if nodes * gpus_per_node % (tp * pp):
        with pytest.raises(
            SnipError, match=rf"^{nodes * gpus_per_node} GPUs \(--nodes {nodes} .*one copy of the model$"
        ):
            job(**changes, smoke=True)
    else:
        found = job(**changes, smoke=True)
        assert found.layout.ranks == nodes * gpus_per_node
        assert found.layout.sequence_parallel == (tp > 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "13b"}, "13b: no such configuration; choose one of 1b, 3b, 7b, "),
        ({"model": "9b"}, "model 9b: unknown; choose one of 1b"),
        ({"tp": 3}, "8 GPUs (--nodes 1 × --gpus-per-node 8) are no multiple of --tp 3 × --pp 1 = 3"),
        *(({name: 0}, f"--{name.replace('_', '-')} 0: must be") for name in ("tp", "nodes", "seq_length")),
        ({"name": "70b", "pp": 3, "nodes": 3}, "--pp 3: llama-70b has 80 blocks, not divisible by 3"),
        ({"global_batch_size": 100}, "--global-batch-size 100: must be a multiple of --micro-batch-size × --dp, 64"),
        ({"data": None}, "--data: missing; give a folder of snip prepare-data, mock for random tokens"),
        ({"data": "/nowhere"}, "--data /nowhere: there is no train.idx in it; make it with snip prepare-data"),
        ({"extra": ("--data-path", "x")}, "--data mock cannot be combined with --data-path"),
        ({"save": None}, "--save: missing; give the folder for checkpoints"),
        ({"save": Path(__file__)}, "is no folder"),
    ],
)
def test_refusals_are_one_line(changes: dict[str, Any], message: str) -> None:
    assert message in refusal(job, **changes)


@pytest.mark.parametrize("missing", ["train.idx", "train.bin", "valid.idx", "valid.bin", "tokenizer"])
def test_data_that_is_not_whole(missing: str, tmp_path: Path) -> None:
    with pytest.raises(SnipError, match=f"there is no {missing} in it"):
        job(data=str(prepared(tmp_path, missing)))


def test_data_of_ones_own(tmp_path: Path) -> None:
    words = megatron_arguments(job(data=f"{prepared(tmp_path)}/"))
    assert value(words, "--train-data-path") == f"{tmp_path}/train"
    assert value(words, "--tokenizer-model") == f"{tmp_path}/tokenizer"
    assert "--mock-data" not in words
    words = megatron_arguments(job(data=None, extra=("--data-path", "mine", "--tokenizer-type", "NullTokenizer")))
    assert words.count("--tokenizer-type") == 1
    assert value(words, "--data-path") == "mine"


def test_goes_on_from_where_it_saves(tmp_path: Path) -> None:
    """Also before the first checkpoint: a job that was killed until then goes on in its own run directory."""
    words = megatron_arguments(job(save=tmp_path))
    assert value(words, "--load") == value(words, "--save") == str(tmp_path)
    assert value(megatron_arguments(job(save=tmp_path, resume=False)), "--load") is None


@pytest.mark.parametrize("load", [("--load", "/base"), ("--load=/base",)])
def test_another_checkpoint_is_where_the_first_start_begins(load: tuple[str, ...], tmp_path: Path) -> None:
    """A job that is queued again must not begin there once more."""

    def last(**changes: Any) -> str | None:
        words = megatron_arguments(job(save=tmp_path, extra=load, **changes))
        return last_value(words, "--load")

    assert last() == "/base"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    assert last() == str(tmp_path)
    assert last(resume=False) == "/base"


def test_the_last_folder_of_checkpoints_is_the_one_that_counts(tmp_path: Path) -> None:
    found = job(save=tmp_path / "a", extra=("--save", "b", f"--save={tmp_path / 'c'}"))
    assert found.save == found.load == tmp_path / "c"
    assert last_value(megatron_arguments(found), "--save") == str(tmp_path / "c")


def test_another_model() -> None:
    words = megatron_arguments(job(name="7b", model="1b", tp=2))
    shapes = ("--num-layers", "--hidden-size", "--num-query-groups", "--rotary-base", "--norm-epsilon", "--seq-length")
    assert [value(words, name) for name in shapes] == ["22", "2048", "4", "10000", "1e-05", "2048"]
    assert value(megatron_arguments(job(model="8b")), "--rotary-base") == "500000"


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ((), (0, 20)),
        (("--train-iters", "7"), (0, 7)),
        (("--train-iters", "7", "--save={}/b", "--train-iters=3"), (3, 3)),
    ],
)
def test_how_far_a_job_is(extra: tuple[str, ...], expected: tuple[int, int], tmp_path: Path) -> None:
    """Megatron's own arguments win, as in Megatron."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "latest_checkpointed_iteration.txt").write_text("3")
    words = tuple(word.format(tmp_path) for word in extra)
    assert progress(job(smoke=True, save=tmp_path / "a", extra=words)) == expected


# -- Megatron's validation, with the whole world size -----------------------------------------------------------
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


@pytest.mark.parametrize(
    ("changes", "graphs"),
    [({}, True), ({"cpu": True}, False), ({"name": "3b"}, False), ({"name": "70b", "smoke": True}, False)],
)
def test_layers_are_replayed_as_graphs_where_transformer_engine_is_installed(
    changes: dict[str, Any], graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = " --cuda-graph-impl transformer_engine --te-rng-tracker "
    assert wanted not in " ".join(megatron_arguments(job(**changes)))  # not installed here
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    words = megatron_arguments(job(**changes, extra=("--cuda-graph-impl", "none")))
    assert (wanted in " ".join(words)) == graphs
    assert last_value(words, "--cuda-graph-impl") == "none"

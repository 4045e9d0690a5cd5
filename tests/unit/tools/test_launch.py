"""Jobs of ``snip launch``: sizes, data and checkpoints."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusal import refusal

from snip_megatron.precision.errors import SnipError
from snip_megatron.tools.launch import last_value, make_job, megatron_arguments, progress


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
        result = job(**changes, smoke=True)
        assert result.layout.ranks == nodes * gpus_per_node
        assert result.layout.sequence_parallel == (tp > 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "13b"}, "13b: no such configuration; choose one of 1b, 3b, 7b, "),
        ({"tp": 3}, "8 GPUs (--nodes 1 × --gpus-per-node 8) are no multiple of --tp 3 × --pp 1 = 3"),
        *(({name: 0}, f"--{name.replace('_', '-')} 0: must be") for name in ("tp", "nodes", "seq_length")),
        ({"name": "70b", "pp": 3, "nodes": 3}, "--pp 3: llama-70b has 80 blocks, not divisible by 3"),
        ({"global_batch_size": 100}, "--global-batch-size 100: must be a multiple of --micro-batch-size × --dp, 64"),
        ({"data": None}, "--data: missing; give a folder of snip prepare-data, mock for random tokens"),
        ({"data": "/nowhere"}, "--data /nowhere: there is no train.idx in it; make it with snip prepare-data"),
        ({"extra": ("--data-path", "x")}, "--data mock cannot be combined with --data-path"),
        ({"save": None}, "--save: missing; give the folder for checkpoints"),
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


def test_a_job_goes_on_from_where_it_saves(tmp_path: Path) -> None:
    """A job that was killed before its first checkpoint goes on in its own run directory too."""
    words = megatron_arguments(job(save=tmp_path))
    assert value(words, "--load") == value(words, "--save") == str(tmp_path)
    assert value(megatron_arguments(job(save=tmp_path, resume=False)), "--load") is None


@pytest.mark.parametrize("load", [("--load", "/base"), ("--load=/base",)])
def test_another_checkpoint_is_where_the_first_start_begins(load: tuple[str, ...], tmp_path: Path) -> None:
    """A job that is queued again must not begin at the other checkpoint again."""

    def last(**changes: Any) -> str | None:
        words = megatron_arguments(job(save=tmp_path, extra=load, **changes))
        return last_value(words, "--load")

    assert last() == "/base"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    assert last() == str(tmp_path)
    assert last(resume=False) == "/base"


def test_the_last_folder_of_checkpoints_is_the_one_that_counts(tmp_path: Path) -> None:
    result = job(save=tmp_path / "a", extra=("--save", "b", f"--save={tmp_path / 'c'}"))
    assert result.save == result.load == tmp_path / "c"
    assert last_value(megatron_arguments(result), "--save") == str(tmp_path / "c")


def test_the_arguments_are_those_of_the_model() -> None:
    words = megatron_arguments(job(name="7b", model="1b", tp=2))
    shapes = ("--num-layers", "--hidden-size", "--num-query-groups", "--rotary-base", "--norm-epsilon", "--seq-length")
    assert [value(words, name) for name in shapes] == ["22", "2048", "4", "10000", "1e-05", "2048"]
    assert value(megatron_arguments(job(model="8b")), "--rotary-base") == "500000"
    assert value(megatron_arguments(job(name="3b")), "--norm-epsilon") == "1e-06"


def test_a_run_has_the_tokens_of_its_configuration_unless_the_user_says_otherwise() -> None:
    assert int(value(megatron_arguments(job()), "--train-iters")) * 1024 * 2048 == pytest.approx(3e12, rel=1e-6)
    assert last_value(megatron_arguments(job(extra=("--train-iters", "7"))), "--train-iters") == "7"


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


@pytest.mark.parametrize(
    ("changes", "graphs"),
    [({}, True), ({"cpu": True}, False), ({"name": "3b"}, False), ({"name": "70b", "smoke": True}, False)],
)
def test_layers_are_replayed_as_graphs_where_transformer_engine_is_installed(
    changes: dict[str, Any], graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = " --cuda-graph-impl transformer_engine --te-rng-tracker "
    assert expected not in " ".join(megatron_arguments(job(**changes)))  # not installed here
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    words = megatron_arguments(job(**changes, extra=("--cuda-graph-impl", "none")))
    assert (expected in " ".join(words)) == graphs
    assert last_value(words, "--cuda-graph-impl") == "none"

"""``--snip-blame`` finds faults beside GEMMs, and their rank, on real gloo ranks that load a checkpoint."""

import json
from pathlib import Path

import pytest
from launch import tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.sensitivity.blame import BUG, NOT_PRECISION, Blame

LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
TP, SP = ("--tensor-model-parallel-size", "2"), ("--tensor-model-parallel-size", "2", "--sequence-parallel")
FAULTS = (
    (TP, "_lost_shard", "decoder.layers.2.mlp.linear_fc2", "reduction"),
    (SP, "_lost_shard", "decoder.layers.1.self_attention.linear_proj", "reduction"),
    (TP, "_lost_gradient", "decoder.layers.2.mlp.linear_fc1", "reduction"),
    (SP, "_racing_gather", "decoder.layers.1.mlp.linear_fc1", "gather"),
    (TP, "_late_gather", "decoder.layers.3.self_attention.linear_qkv", "parameter"),
    (TP, "_unequal_replicas", "decoder.layers.0.pre_mlp_layernorm", "replica"),
    ((), "_unequal_replicas", "decoder.layers.3.mlp.linear_fc1", "replica"),
)


@pytest.fixture(scope="module")
def folder(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of iteration 3 and a map."""
    path = tmp_path_factory.mktemp("blame")
    warm.succeed(1, tiny_llama_args("--bf16", "--save", str(path / "saved"), "--save-interval", "9", iters=3), tmp=path)
    names = [f"decoder.layers.{layer}.{linear}" for layer in range(4) for linear in LINEARS]
    choices = {f"{name}:{gemm}": "fp8" for name in names for gemm in ("fprop", "dgrad", "wgrad")}
    (path / "map.json").write_text(json.dumps({"schema": "snip.map/1", "choices": choices}))
    return path


def blame(warm: WarmRanks, folder: Path, tmp: Path, layout: tuple[str, ...], **planted: str) -> Blame:
    arguments = [*layout, "--bf16", "--load", str(folder / "saved"), "--snip-map", str(folder / "map.json")]
    arguments += ["--snip", "--snip-dir", str(tmp / "run"), "--snip-blame", "4", "--override-opt-param-scheduler"]
    module = "planted_pretrain" if planted else "snip_megatron.pretrain_gpt"
    warm.succeed(2, tiny_llama_args(*arguments, iters=5), tmp=tmp, module=module, env=planted)
    return Blame.load(tmp / "run" / "blame_4.json")


@pytest.mark.distributed
@pytest.mark.parametrize(("layout", "plant", "linear", "kind"), FAULTS, ids=[f"{f[1]}{len(f[0])}" for f in FAULTS])
def test_a_fault_of_one_rank_is_found_there(
    warm: WarmRanks, folder: Path, tmp_path: Path, layout: tuple[str, ...], plant: str, linear: str, kind: str
) -> None:
    found = blame(warm, folder, tmp_path, layout, PLANT=plant, LINEAR=linear)
    assert found.verdict == BUG, found.reason
    assert found.bug is not None
    assert (found.bug.kind, found.bug.linear, found.bug.rank) == (kind, linear, 1)


@pytest.mark.distributed
def test_healthy_ranks_are_not_blamed(warm: WarmRanks, folder: Path, tmp_path: Path) -> None:
    found = blame(warm, folder, tmp_path, SP)
    assert found.verdict == NOT_PRECISION, found.reason
    assert found.bug is None

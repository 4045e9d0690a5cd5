"""``--snip-blame`` finds faults beside GEMMs, and their rank, on real gloo ranks that load a checkpoint."""

from pathlib import Path

import pytest
from dense_names import dense_names
from launch import tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.sensitivity.blame import BUG, Blame

TP = ("--tensor-model-parallel-size", "2")
# More faults, under sequence parallelism too, and healthy steps: test_blame.py.
FAULTS = (
    (TP, "lost_shard", "decoder.layers.2.mlp.linear_fc2", "reduction"),
    (TP, "unequal_replicas", "decoder.layers.0.pre_mlp_layernorm", "replica"),
    ((), "unequal_replicas", "decoder.layers.3.mlp.linear_fc1", "replica"),
)


@pytest.fixture(scope="module")
def folder(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of iteration 3 and a map."""
    path = tmp_path_factory.mktemp("blame")
    warm.succeed(1, tiny_llama_args("--bf16", "--save", str(path / "saved"), "--save-interval", "9", iters=3), tmp=path)
    (path / "map.json").write_text(PrecisionMap.uniform(dense_names(4), Format.FP8).to_json())
    return path


@pytest.mark.parametrize(("layout", "plant", "linear", "kind"), FAULTS, ids=[f"{f[1]}{len(f[0])}" for f in FAULTS])
def test_a_fault_of_one_rank_is_found_there(
    warm: WarmRanks, folder: Path, tmp_path: Path, layout: tuple[str, ...], plant: str, linear: str, kind: str
) -> None:
    arguments = [*layout, "--bf16", "--load", str(folder / "saved"), "--snip-map", str(folder / "map.json")]
    arguments += ["--snip", "--snip-dir", str(tmp_path / "run"), "--snip-blame", "4", "--override-opt-param-scheduler"]
    env = {"PLANT": plant, "LINEAR": linear}
    warm.succeed(2, tiny_llama_args(*arguments, iters=5), tmp=tmp_path, module="blamed_pretrain:planted", env=env)
    result = Blame.load(tmp_path / "run" / "blame_4.json")
    assert result.verdict == BUG, result.reason
    assert result.bug is not None
    assert (result.bug.kind, result.bug.linear, result.bug.rank) == (kind, linear, 1)

"""Resuming continues bit for bit, with SNIP switched on and off."""

from pathlib import Path
from typing import Any

import pytest
from altered_pretrain import read_traces
from checkpoints import differences, read_checkpoint
from launch import tiny_llama_args
from resumes import EXPERTS, LATENT
from warm_ranks import WarmRanks

# Dropout, so that a lost random state shows.
DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
_BY_POSITION = "--use-distributed-optimizer"
_BY_NAME = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
_PIPELINE = "--pipeline-model-parallel-size 2"
_MIXTURE = f"{LATENT} {EXPERTS} --expert-model-parallel-size 2"
SWITCHED: dict[str, tuple[int, str]] = {
    "pp2-virtual-by-position": (2, f"{_BY_POSITION} {_PIPELINE} --num-layers-per-virtual-pipeline-stage 1"),
    "dp2-by-position": (2, f"{_BY_POSITION} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"),
    "dp2-by-name": (2, f"{_BY_NAME} --grad-reduce-in-bf16 --global-batch-size 8"),
    "latent-by-position": (2, f"{_BY_POSITION} {LATENT} --tensor-model-parallel-size 2 --sequence-parallel"),
    "mixture-by-position": (2, f"{_BY_POSITION} {_MIXTURE}"),
    "mixture-by-name": (2, f"{_BY_NAME} {_MIXTURE}"),
    "mixture-torch": (2, f"{_BY_POSITION} --ckpt-format torch {_MIXTURE}"),
}
FAST = ("pp2-virtual-by-position", "mixture-by-name", "mixture-torch")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.matrix) for name in SWITCHED]
)
def test_snip_switched_on_and_off_again_is_an_uninterrupted_plain_run(
    warm: WarmRanks, tmp_path: Path, name: str
) -> None:
    """Steps up to 3 run without SNIP, those up to 6 under an all-bf16 map, and those up to 9 without SNIP.

    Every bit of the last checkpoint is that of the run without SNIP: weights, main values, moments, random states.
    """
    ranks, layout = SWITCHED[name]

    def part(of: str, *extra: str) -> list[dict[str, Any]]:
        args = tiny_llama_args("--bf16", *DROPOUT, *layout.split(), "--save-interval", "3", *extra, iters=9)
        env = {"TRACE": str(tmp_path / of)}
        process = warm.succeed(ranks, args, module="altered_pretrain", tmp=tmp_path / of, env=env)
        assert "holds no SNIP state" not in process.stdout  # nothing is missing under a fixed map
        return read_traces(tmp_path / of)

    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    snip = ("--snip", "--snip-policy", "bf16", "--snip-dir", str(tmp_path / "run"), "--exit-interval", "6")
    whole = part("whole", "--save", first)
    # Not by --ckpt-step: in the format torch, Megatron would take the optimizer's states from the newest checkpoint.
    (tmp_path / "first" / "latest_checkpointed_iteration.txt").write_text("3")
    middle = part("middle", "--load", first, "--save", second, *snip)
    last = part("last", "--load", second, "--save", second)
    for rank in range(ranks):
        for figures in ("losses", "grad_norms"):
            result = middle[rank][figures] | last[rank][figures]
            assert result == {step: value for step, value in whole[rank][figures].items() if step > 3}
        assert sorted(middle[rank]["grad_norms"]) == [4, 5, 6]
        assert last[rank]["weights"] == whole[rank]["weights"]
    if "--ckpt-format torch" not in layout:
        assert differences(read_checkpoint(Path(first), 9), read_checkpoint(Path(second), 9)) == []

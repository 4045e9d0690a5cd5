"""Trainings in which data parallel ranks shard parameters, gradients and optimizer states: by Megatron-FSDP, and by
torch's ``fully_shard``.
"""

import functools
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from altered_pretrain import traced
from launch import tiny_llama_args
from resumes import EXPERTS, LATENT
from test_warm_up import assert_all_is_warmed_up
from warm_ranks import WarmRanks

from snip_megatron.runtime.run_data import read_maps
from snip_megatron.sensitivity.table import StatisticsTable

STEPS, SAVED = 7, 2  # a checkpoint is written every so many steps
MODEL = "--num-layers 2 --micro-batch-size 1 --global-batch-size 4 --bf16"
WHOLE = "--use-distributed-optimizer"
SHARDED = {
    "megatron": f"{WHOLE} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
    " --ckpt-format fsdp_dtensor",
    "torch": "--use-torch-fsdp2 --ckpt-format torch_dist",
}
by = pytest.mark.parametrize("by", SHARDED)
MIXTURE = f"{LATENT} {EXPERTS} --expert-model-parallel-size 2"
UPDATED = (
    "--snip --snip-estimator noise "
    "--snip-budget fp4=0.5 --snip-formats fp8,fp4 --snip-first-update 1 --snip-update-interval 4 --snip-lag 1"
    " --snip-wait 120"
)
Train = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def train(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """A function that trains on two ranks and returns what each of them recorded. Equal calls train once."""
    folder = tmp_path_factory.mktemp("trainings")

    @functools.cache
    def run(
        name: str, layout: str, snip: str = "", load: str | None = None, ranks: int = 2, at: int = 2 * SAVED
    ) -> Any:
        if "megatron-fsdp" in layout:
            pytest.importorskip("einops", reason="Megatron-FSDP needs einops")
        words = [*shlex.split(f"{MODEL} {layout} {snip}"), "--save", str(folder / name), "--save-interval", str(SAVED)]
        words += ["--snip-dir", str(folder / name / "snip")] if snip else []
        words += [] if load is None else ["--load", str(folder / load), "--ckpt-step", str(at)]
        args = tiny_llama_args(*words, iters=STEPS)
        return traced(warm, ranks, args, folder / name, CUDA_DEVICE_MAX_CONNECTIONS="8", WHOLE_MOCK_DATA="1")

    run.folder = folder  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize(
    ("by", "model"), [("megatron", ""), ("torch", ""), ("megatron", MIXTURE)], ids=["megatron", "torch", "mixture"]
)
def test_an_all_bf16_map_from_stock_s_checkpoint_and_back_is_stock_bit_by_bit(
    by: str, model: str, train: Train
) -> None:
    layout, of = f"{SHARDED[by]} {model}", f"{by}{'/mixture' if model else ''}"
    stock = train(f"{of}/stock", layout)
    ways = (("there", "--snip --snip-policy bf16", "stock", 2 * SAVED), ("back", "", "there", 3 * SAVED))
    for name, snip, load, at in ways:
        for whole, part in zip(stock, train(f"{of}/{name}", layout, snip, f"{of}/{load}", at=at), strict=True):
            assert sorted(part["losses"]) == list(range(at + 1, STEPS + 1))
            assert part["losses"] == {step: whole["losses"][step] for step in part["losses"]}
            assert part["grad_norms"] == {step: whole["grad_norms"][step] for step in part["grad_norms"]}
            assert part["weights"] == whole["weights"]


@by
def test_updated_maps_train_nearly_as_bf16_and_resume_bit_by_bit(by: str, train: Train) -> None:
    """The probe of the first update leaves nothing behind: the next step's loss is stock's."""
    stock, updated = train(f"{by}/stock", SHARDED[by]), train(f"{by}/updated", SHARDED[by], UPDATED)
    resumed = train(f"{by}/resumed", SHARDED[by], UPDATED, f"{by}/updated")
    for plain, whole, part in zip(stock, updated, resumed, strict=True):
        assert {step: plain["losses"][step] for step in (1, 2)} == {step: whole["losses"][step] for step in (1, 2)}
        assert plain["losses"][STEPS] != whole["losses"][STEPS]
        assert float.fromhex(whole["losses"][STEPS]) == pytest.approx(float.fromhex(plain["losses"][STEPS]), rel=1e-2)
        assert part["losses"] == {step: whole["losses"][step] for step in range(2 * SAVED + 1, STEPS + 1)}
        assert part["weights"] == whole["weights"]
    folder = train.folder  # type: ignore[attr-defined]
    assert len(read_maps(folder / by / "updated" / "snip")) == 2


@pytest.mark.parametrize(
    ("by", "kind"),
    [
        *((by, "") for by in SHARDED),
        ("megatron", f"{MIXTURE} --global-batch-size 2"),  # with more microbatches Megatron scales experts again
    ],
    ids=["megatron", "torch", "mixture"],
)
def test_statistics_are_those_of_the_distributed_optimizer(by: str, kind: str, train: Train) -> None:
    """Up to the rounding of a microbatch's gradient to bf16, of weights, gradients and update errors."""
    tables = []
    for name, layout in ((f"{by}/updated{kind[:30]}", SHARDED[by]), (f"unsharded{kind[:30]}", WHOLE)):
        train(name, f"{layout} {kind}".strip(), UPDATED)
        folder = train.folder / name / "snip" / "stats"  # type: ignore[attr-defined]
        tables.append(StatisticsTable.load(sorted(folder.glob("*.npz"))[0]))
    sharded, whole = tables
    for field in ("w2", "gw2", "s2"):
        np.testing.assert_allclose(sharded.linear[field], whole.linear[field], rtol=2e-2, err_msg=field)
    np.testing.assert_allclose(sharded.by_format["wdrift2"], whole.by_format["wdrift2"], rtol=0.1)
    np.testing.assert_allclose(sharded.arrays["sink_w2"], whole.arrays["sink_w2"], rtol=1e-2)
    np.testing.assert_allclose(sharded.arrays["sink_drift2"], whole.arrays["sink_drift2"], rtol=0.5)


@by
def test_tensor_parallel_ranks(by: str, train: Train) -> None:
    """They share a converted linear's weight as Megatron's class does, and sum the gradients of their norms."""
    layout = f"{SHARDED[by]} --tensor-model-parallel-size 2 --sequence-parallel"
    tensor, alone = train(f"{by}/tp", layout, UPDATED, ranks=4), train(f"{by}/updated", SHARDED[by], UPDATED)
    losses = [float.fromhex(each[0]["losses"][STEPS]) for each in (tensor, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


@pytest.mark.matrix
@by
def test_nothing_is_launched_that_was_not_warmed_up(by: str, warm: WarmRanks, tmp_path: Path) -> None:
    if by == "megatron":
        pytest.importorskip("einops", reason="Megatron-FSDP needs einops")
    assert_all_is_warmed_up(warm, tmp_path, SHARDED[by], CUDA_DEVICE_MAX_CONNECTIONS="8")

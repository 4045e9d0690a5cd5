"""Megatron-FSDP shards small models over two GPUs, through the real ``pretrain``.

Stock, and from its checkpoint an all-bf16 map, bit for bit; updated maps, with losses near those of bf16, resumed bit
for bit. ``SNIP_FAMILIES=NAME,...`` chooses models.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_families import BF16, EXPERTS, FIRST, SECOND, UPDATED, Family

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SHARDED = """
--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor
--no-gradient-accumulation-fusion --group-query-attention --num-query-groups 4 --qk-layernorm
"""
MODELS = {"dense": SHARDED, "experts": f"{SHARDED} {EXPERTS} --expert-model-parallel-size 2"}
chosen = os.environ.get("SNIP_FAMILIES", ",".join(MODELS)).split(",")


@pytest.fixture(scope="module", params=[name for name in MODELS if name in chosen])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    found = Family(tmp_path_factory.mktemp(request.param), MODELS[request.param], ranks=2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda each: found.train(*each, SECOND), [("stock", ""), ("updated", UPDATED)]))
        later = [("there", BF16, "stock"), ("resumed", UPDATED, "updated")]
        list(pool.map(lambda each: found.train(each[0], each[1], SECOND, load=each[2], at=FIRST), later))
    return found


@pytest.mark.parametrize(("name", "whole"), [("there", "stock"), ("resumed", "updated")])
def test_a_training_goes_on_bit_for_bit(name: str, whole: str, family: Family) -> None:
    """From stock's checkpoint under an all-bf16 map, and from that of updated maps."""
    for figures in ("losses", "grad_norms"):
        part = family.found[name][figures]
        assert sorted(map(int, part)) == list(range(FIRST + 1, SECOND + 1))
        assert part == {step: family.found[whole][figures][step] for step in part}
    assert family.found[name]["weights"] == family.found[whole]["weights"]


def test_updated_maps_train_nearly_as_bf16(family: Family) -> None:
    stock, mapped = (
        [float.fromhex(each) for each in family.found[name]["losses"].values()] for name in ("stock", "updated")
    )
    assert len([event for event in family.events("updated") if event["event"] == "adopt"]) == 2
    assert mapped != stock
    assert sum(mapped[-5:]) / sum(stock[-5:]) == pytest.approx(1.0, abs=0.05)
    assert "stays bf16" not in family.stdout("updated")

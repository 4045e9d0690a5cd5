"""Experts and tensor parallelism on two GPUs, through the real ``pretrain``: families of :mod:`test_families`.

A mixture with its experts on two ranks, under an all-bf16 map and under updated maps; the same with its exchanges of
tokens behind computation, with delayed wgrads and with CUDA graphs; a dense model whose tensor parallel exchanges are
Transformer Engine's user buffers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from test_families import (
    BF16,
    FAMILIES,
    FIRST,
    REPOSITORY,
    SECOND,
    STEPS,
    UPDATED,
    Family,
    goes_on_bit_for_bit,
    trains_nearly_as_stock,
)

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
]
AT_ONCE = 3
EXPERTS = f"{FAMILIES['experts']} --expert-model-parallel-size 2 --global-batch-size 8"
TENSOR = f"""
{FAMILIES["dense"]} --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap
--tp-comm-bootstrap-backend nccl
"""
OVERLAPPED = f"{UPDATED} --overlap-moe-expert-parallel-comm --delay-wgrad-compute"
GRAPHS = "--cuda-graph-impl transformer_engine --te-rng-tracker --cuda-graph-modules"
OVERLAPS = {
    "overlapped": OVERLAPPED,
    "overlapped_router": f"{OVERLAPPED} {GRAPHS} moe_router moe_preprocess",
    "overlapped_attention": f"{OVERLAPPED} {GRAPHS} attn moe_router moe_preprocess",
}
APEX = (REPOSITORY / "benchmarks/jobs/stand_ins",)
"""Graphs hold no delayed wgrad unless it is added to ``main_grad`` in its GEMM, for which Megatron looks for Apex."""


Trained = Callable[..., Family]
"""Returns a family of which the named trainings have succeeded."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Everything that is trained here. A training that fails, fails the tests that look at it."""
    families = {
        name: Family(tmp_path_factory.mktemp(name), arguments, 2)
        for name, arguments in (("experts", EXPERTS), ("tensor", TENSOR))
    }
    runs: dict[tuple[str, str], Future[None]] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:

        def begin(family: str, name: str, snip: str, **given: Any) -> None:
            runs[family, name] = pool.submit(families[family].train, name, snip, STEPS, **given)

        begin("experts", "stock", "")
        begin("experts", "updated", UPDATED)
        begin("tensor", "stock", "")
        begin("tensor", "updated", f"{UPDATED} --snip-pin *.linear_qkv=bf16")
        for name, snip in OVERLAPS.items():
            begin("experts", name, snip, path=APEX)
        wait([runs["experts", "stock"]])
        begin("experts", "bf16", BF16, load="stock", at=FIRST)
        wait([runs["experts", "updated"]])
        begin("experts", "resumed", UPDATED, load="updated", at=SECOND)

    def of(family: str, *names: str) -> Family:
        for name in names:
            runs[family, name].result()
        return families[family]

    return of


def test_an_all_bf16_map_is_stock_s_bits_with_experts_on_two_ranks(trained: Trained) -> None:
    goes_on_bit_for_bit(trained("experts", "stock", "bf16"), "bf16", of="stock", at=FIRST)


def test_experts_on_two_ranks_resume_bit_for_bit(trained: Trained) -> None:
    goes_on_bit_for_bit(trained("experts", "updated", "resumed"), "resumed", of="updated", at=SECOND)


@pytest.mark.parametrize(
    ("family", "name"), [("experts", "updated"), *(("experts", name) for name in OVERLAPS), ("tensor", "updated")]
)
def test_updated_maps_train_nearly_as_bf16(trained: Trained, family: str, name: str) -> None:
    found = trained(family, "stock", name)
    trains_nearly_as_stock(found, name)
    assert len([event for event in found.events(name) if event["event"] == "adopt"]) == 2
    assert "stays bf16" not in found.stdout(name)
    assert (found.found[name]["replays"][str(STEPS)] > 0) == (GRAPHS in OVERLAPS.get(name, ""))

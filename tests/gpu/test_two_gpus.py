"""Experts and tensor parallelism on two GPUs, through the real ``pretrain``: families of :mod:`test_families`.

A mixture with its experts on two ranks, under an all-bf16 map and under updated maps; the same with its exchanges of
tokens behind computation, with delayed wgrads and with CUDA graphs; a dense model whose tensor parallel exchanges are
Transformer Engine's user buffers.
"""

import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from test_families import (
    BF16,
    FAMILIES,
    FIRST,
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
GRAPHS = "--cuda-graph-impl transformer_engine --te-rng-tracker --cuda-graph-modules attn moe_router moe_preprocess"


TRAININGS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "experts": {
        "stock": ("", {}),
        "updated": (UPDATED, {}),
        "overlapped": (OVERLAPPED, {}),
        "graphs": (f"{UPDATED} --overlap-moe-expert-parallel-comm {GRAPHS}", {}),
        "bf16": (BF16, {"load": "stock", "at": FIRST}),
        "resumed": (UPDATED, {"load": "updated", "at": SECOND}),
    },
    "tensor": {"stock": ("", {}), "updated": (f"{UPDATED} --snip-pin *.linear_qkv=bf16", {})},
}
"""Family → name → arguments of SNIP and of :meth:`Family.train`. One that is loaded comes first."""
Trained = Callable[..., Family]
"""Returns a family of which the named trainings have succeeded."""


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """The trainings that the chosen tests look at. One that fails, fails these tests."""
    wanted = {
        (each.callspec.params["family"], name)  # type: ignore[attr-defined]
        for each in request.session.items
        if each.path == Path(__file__)
        for name in each.callspec.params["names"]  # type: ignore[attr-defined]
    }
    families = {
        name: Family(tmp_path_factory.mktemp(name), arguments, 2)
        for name, arguments in (("experts", EXPERTS), ("tensor", TENSOR))
    }
    runs: dict[tuple[str, str], Future[None]] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for family, trainings in TRAININGS.items():
            for name, (snip, given) in trainings.items():
                if (family, name) in wanted:
                    source = runs.get((family, given.get("load", "")))
                    runs[family, name] = pool.submit(_train, source, families[family], name, snip, given)

        def of(family: str, names: tuple[str, ...]) -> Family:
            for name in names:
                runs[family, name].result()
            return families[family]

        yield of


def _train(source: Future[None] | None, family: Family, name: str, snip: str, given: dict[str, Any]) -> None:
    if source is not None:  # it began before, so that it never waits for this
        source.result()
    family.train(name, snip, STEPS, **given)


@pytest.mark.parametrize(("family", "names"), [("experts", ("stock", "bf16"))])
def test_an_all_bf16_map_is_stock_s_bits(trained: Trained, family: str, names: tuple[str, ...]) -> None:
    goes_on_bit_for_bit(trained(family, names), "bf16", of="stock", at=FIRST)


@pytest.mark.parametrize(("family", "names"), [("experts", ("updated", "resumed"))])
def test_updated_maps_resume_bit_for_bit(trained: Trained, family: str, names: tuple[str, ...]) -> None:
    goes_on_bit_for_bit(trained(family, names), "resumed", of="updated", at=SECOND)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("experts", ("stock", "updated")),
        ("experts", ("stock", "overlapped")),
        ("experts", ("stock", "graphs")),
        ("tensor", ("stock", "updated")),
    ],
    ids=["experts", "overlapped", "graphs", "tensor"],
)
def test_updated_maps_train_nearly_as_bf16(trained: Trained, family: str, names: tuple[str, ...]) -> None:
    found, (_, name) = trained(family, names), names
    trains_nearly_as_stock(found, name)
    assert len([event for event in found.events(name) if event["event"] == "adopt"]) == 2
    assert "stays bf16" not in found.stdout(name)
    assert (found.found[name]["replays"][str(STEPS)] > 0) == (GRAPHS in TRAININGS[family][name][0])

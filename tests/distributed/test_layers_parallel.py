"""Linears over two tensor parallel ranks are the whole linear: outputs, gradients, draws of stochastic rounding."""

from pathlib import Path

import pytest
import torch
from parallel_linears import CANDIDATES, CASES, NVFP4, TENSOR, WHOLE_TENSOR_CASES, Case, Tensors, local_tensors, shard
from warm_ranks import WarmRanks

from snip_megatron.numerics.products.check import decibel

Results = dict[str, Tensors]


@pytest.fixture(scope="module")
def folder(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of what the two ranks wrote."""
    folder = tmp_path_factory.mktemp("linears")
    warm.succeed(2, [], module="parallel_linears", tmp=folder, env={"OUT": str(folder)})
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> tuple[list[Results], Results]:
    """Return the results of each rank, and those of the whole linear."""
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)], torch.load(folder / "whole.pt")


def expected_share(case: Case, whole: Tensors, rank: int) -> Tensors:
    """Return a rank's part of the whole linear's Y, ∂L/∂X and ∇W."""
    y, d, gw = whole
    if case.row:
        return shard(y, 0, rank, 2) if case.sequence_parallel else y, shard(d, -1, rank, 2), shard(gw, 1, rank, 2)
    halves = 2 if case.gated else 1
    d = shard(d, 0, rank, 2) if case.sequence_parallel else d
    return shard(y, -1, rank, 2, halves=halves), d, shard(gw, 0, rank, 2, halves=halves)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shards_are_the_whole(case: Case, results: tuple[list[Results], Results]) -> None:
    """FP32 tensors: 120 dB leaves room for the order of FP32 sums only. One element of G rounded the other way costs
    over 40 dB more. bf16 tensors: partial results are rounded before their reduction."""
    ranks, whole = results
    for rank in range(2):
        shares = expected_share(case, whole[str(case)], rank)
        for kind, expected, actual in zip(("Y", "dX", "dW"), shares, ranks[rank][str(case)], strict=True):
            assert actual.shape == expected.shape
            least = 45 if case.dtype == torch.bfloat16 and kind != "dW" else 120
            assert decibel(expected, actual) > least, (kind, rank)


@pytest.mark.parametrize("case", WHOLE_TENSOR_CASES, ids=str)
def test_errors_that_a_probe_records_are_those_of_the_whole(case: Case, folder: Path) -> None:
    """fp8_tensor and nvfp4 scale by an amax that one rank has; sums of squares add over the ranks."""
    whole = torch.load(folder / "recorded.pt")[str(case)]
    ranks = [torch.load(folder / f"recorded{rank}.pt")[str(case)] for rank in range(2)]
    assert {"dx_row2", "dx_col2", "dg_row2", "dg_col2", "dw2"} <= whole.keys()
    for column, expected in whole.items():
        assert expected.shape == (len(CANDIDATES),)
        torch.testing.assert_close(ranks[0][column] + ranks[1][column], expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("case", [case for case in CASES if case.sequence_parallel], ids=str)
def test_under_sequence_parallelism_a_rank_saves_its_own_tokens(case: Case, folder: Path) -> None:
    """Megatron's own linear, the all-bf16 case, does so too. The gathered X would take twice the memory."""
    x, _, _ = local_tensors(case, 0, 2)
    expected = [x.numel() * x.element_size()]
    if case.row and {TENSOR, NVFP4}.intersection((case.formats[0], case.formats[2])):
        expected.append(4)  # the amax of the whole
    for rank in range(2):
        assert torch.load(folder / f"saved{rank}.pt")[str(case)] == expected

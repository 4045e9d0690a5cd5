"""The bounds of ``--snip-blame`` for correct GEMMs."""

import pytest
import torch

from snip_megatron.precision import Format, Gemm
from snip_megatron.runtime.gemm_check import BOUND, bound_of, difference

MEASURED = {768: 38.0, 2048: 35.0, 5632: 30.4}
"""Number of products → the least ratio of healthy fprops with one scale a tensor, measured on an H200."""


@pytest.mark.parametrize("depth", MEASURED)
def test_healthy_gemms_on_a_hopper_card_are_above_their_bound(depth: int) -> None:
    assert bound_of(Format.FP8_TENSOR, Gemm.FPROP, depth) < MEASURED[depth] - 2.0


def test_more_products_lower_the_bound_only_where_one_accumulator_adds_them_all() -> None:
    assert bound_of(Format.FP8_TENSOR, Gemm.DGRAD, 8192) == pytest.approx(BOUND[8] - 6.02, abs=0.01)
    assert bound_of(Format.FP8_TENSOR, Gemm.WGRAD, 8192) == bound_of(Format.FP8, Gemm.FPROP, 8192) == BOUND[8]


def test_lost_rows_are_below_any_bound() -> None:
    reference = torch.randn(64, 32)
    lost = reference.clone()
    lost[-2:] = 0
    result = difference(reference, lost, bound_of(Format.FP8_TENSOR, Gemm.FPROP, 32768))
    assert result is not None
    assert "rows 62-63" in result.where
    assert result.sqnr < 1

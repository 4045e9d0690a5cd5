"""Loss divergence: known answers, units, and which GEMMs have one."""

import numpy as np
import pytest

from snip_megatron.precision.errors import SnipError
from snip_megatron.sensitivity.divergence import first_order, second_order

from .synthetic import make_table, scaled_loss, with_columns


def test_second_order_is_half_the_tokens_times_the_squared_products() -> None:
    table = with_columns(make_table(), "by_format", c2=np.array([1e-6, 4e-6]))
    scores = second_order(table, ("fp4", "fp8"))
    assert scores.shape == (8, 3, 2)
    np.testing.assert_allclose(scores[:, 0], [[512 * 4e-6, 512 * 1e-6]] * 8)
    assert not scores[:, 1:].any()


def test_first_order_known_answer() -> None:
    table = with_columns(make_table(), "linear", d2=3.0, gw2=5.0)
    table = with_columns(table, "by_format", dx_row2=7.0, dw2=11.0)
    n, k = 192, 64
    expected = np.sqrt(3.0 * 7.0 / (1024 * k) + 5.0 * 11.0 / (n * k))
    assert first_order(table, ("fp4",))[0, 0, 0] == pytest.approx(expected)


def test_scaling_the_loss_scales_all_options_alike() -> None:
    table = make_table()
    scaled, own = (second_order(each, ("fp8", "fp4"))[:, 0] for each in (scaled_loss(table, 3.0), table))
    np.testing.assert_allclose(scaled, 9.0 * own)


def test_bf16_has_none_and_an_unrecorded_format_is_named() -> None:
    table = make_table(formats=("fp8", "fp4"))
    assert not second_order(table, ("bf16",)).any()
    with pytest.raises(SnipError, match=r"step 7 hold no nvfp4 \(only fp8, fp4\)"):
        second_order(table, ("fp8", "nvfp4"))

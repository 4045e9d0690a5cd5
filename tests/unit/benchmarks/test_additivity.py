"""The models of a rise of the loss by a set of fprops, and the sets that they choose."""

import itertools

import pytest

from benchmarks.quality.additivity import Model, Set

NAMES = [
    f"decoder.layers.{layer}.{path}" for layer in (0, 1) for path in ("self_attention.linear_qkv", "mlp.linear_fc1")
]
ALONE = Model(dict(zip(NAMES, (1.0, 1.2, 1.1, 1.6), strict=True)))


def test_a_term_for_pairs_is_found_and_spreads_a_choice_over_blocks() -> None:
    true = Model(ALONE.predicted, (1.5, 2.0))
    several = [set(pair) for n in (1, 2, 3) for pair in itertools.combinations(NAMES, n)]
    model = ALONE.fitted([Set("random", tuple(names), (true.rise(names),)) for names in several], 2)
    assert model.factors == pytest.approx((1.5, 2.0))
    flops = dict.fromkeys(NAMES, 1.0)
    assert ALONE.chosen(flops, 0.5) == (NAMES[0], NAMES[2])
    close = Model(dict(zip(NAMES, (1.0, 1.01, 1.1, 1.6), strict=True)))
    assert close.chosen(flops, 0.5) == (NAMES[1], NAMES[0])
    assert Model(close.predicted, (1.0, 2.0)).chosen(flops, 0.5) == (NAMES[0], NAMES[2])

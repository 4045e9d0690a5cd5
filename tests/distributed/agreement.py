"""How far two tables of statistics may differ when only the order of additions differs between their runs.

Layouts, kernels and thread counts add in different orders, so two correct runs differ in the last bits. Three things
follow, each with its own limit:

- Most columns are sums of squares of many elements. They agree to :data:`STATISTICS_LIMIT`.
- Some columns are squared differences of two close quantities (:func:`_minuends`). An error of a few units in the last
  place of these quantities is a larger share of their difference: :data:`ULPS`.
- A value on a boundary between two representable numbers can be rounded to either of them. This *flip* changes the
  sign of its rounding error and not its size, so it matters where products with that error are summed: in ``e2`` and
  ``c2``. A flip moves the term of one token. Entries that see no flip agree to :data:`STATISTICS_LIMIT`, and of each
  kind of linear there are some (:data:`TOUCHED_SHARE`). No entry moves by more than the terms of
  :data:`FLIPPED_TOKENS` average tokens.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from snip_megatron.sensitivity.table import StatisticsTable

STATISTICS_LIMIT = 1e-5
UNIT = 2.0**-24
"""Relative rounding error of FP32."""
ULPS = 8
"""Units in the last place of what is subtracted. Seen: 2.6 with AdamW, 3.1 with Muon (five iterations of products)."""
FLIPPED_TOKENS = {"by_format.e2": 6.0, "by_format.c2": 64.0}
"""One flip of any element of X, over all linears of the layouts' dense model: the largest 1 in 1000 move ``e2`` by the
terms of 2.6 and ``c2`` by those of 31 average tokens, the median by 0.02 and 0.08. Tokens differ much in G_t·E_t."""
TOUCHED_SHARE = 0.75
"""At most this share of the entries of one column and one kind of linear is beyond STATISTICS_LIMIT. About one element
in 10⁶ flips in fp8 and one in 10⁷ in fp4, which touches half of the fp8 entries and few of the fp4 ones. A fault of a
kind of linear touches all of them."""

Array = NDArray[np.float64]


def differences_of_passes(table: StatisticsTable) -> dict[str, Array]:
    """Columns that are ‖a − b‖² for close a and b, and ‖a‖² of each, shaped to divide by the column."""
    linear, boundary = table.linear, table.boundary
    saturated = table.arrays["drift2"][:, -1:]  # of an error of ten times the gradient: the whole update
    return {
        "drift2": saturated,
        "sink_drift2": table.arrays["sink_drift2"][:, -1:],
        "by_format.wdrift2": saturated,
        "linear.fx2": linear["xs2"],
        "linear.fg2": linear["gs2"],
        "boundary.fr2": boundary["r2"],
        "boundary.cn2": boundary["h2"] * boundary["r2"] / table.tokens,
    }


def worst_differences(
    expected: StatisticsTable, actual: StatisticsTable, *, ragged: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What :func:`agree` judges.

    Args:
        ragged: endings of columns whose entries of experts are held to a limit of their own.

    Returns:
        ``value`` and ``column``: the worst relative difference, and where. ``close``: the worst share of its own limit
        among columns that are differences of close quantities. ``flips``: the same among columns that flips move.
        ``touched``: the largest share of entries of one of these, and one kind of linear, beyond STATISTICS_LIMIT.
        ``ragged``: the worst relative difference of ragged entries. ``same_rows``: whether the tables describe the same
        linears and tokens.
    """
    result: dict[str, Any] = {"value": 0.0, "column": "", "close": 0.0, "flips": 0.0, "touched": 0.0, "ragged": 0.0}
    kinds = np.array([row.id.path for row in expected.linears])
    experts = np.array([row.experts > 1 for row in expected.linears])
    minuends = differences_of_passes(expected)
    for name, array in expected.arrays.items():
        distance = apart(array, actual.arrays[name])
        if ragged and name.endswith(ragged) and experts.any():
            result["ragged"] = max(result["ragged"], float(distance[experts].max()))
            distance[experts] = 0.0
        if name in minuends:
            ratio = np.sqrt(minuends[name] / np.where(array > 0, array, np.inf))
            limits = STATISTICS_LIMIT + 2 * ULPS * UNIT * ratio
            result["close"] = max(result["close"], float((distance / limits).max()))
        elif name in FLIPPED_TOKENS:
            limit = FLIPPED_TOKENS[name] / expected.tokens
            result["flips"] = max(result["flips"], float(distance.max()) / limit)
            beyond = [float((distance[kinds == kind] > STATISTICS_LIMIT).mean()) for kind in set(kinds)]
            result["touched"] = max(result["touched"], *beyond)
        elif float(distance.max()) > result["value"]:
            result["value"], result["column"] = float(distance.max()), name
    shapes = [[(r.name, r.n, r.k) for r in table.linears] for table in (expected, actual)]
    same = shapes[0] == shapes[1] and (expected.sinks, expected.tokens) == (actual.sinks, actual.tokens)
    return result | {"same_rows": same and expected.tokens_per_step == actual.tokens_per_step}


def agree(worst: dict[str, Any]) -> bool:
    """Return whether another order of additions explains the differences of :func:`worst_differences`."""
    within = worst["value"] <= STATISTICS_LIMIT and worst["close"] <= 1.0 and worst["flips"] <= 1.0
    return bool(within and worst["touched"] <= TOUCHED_SHARE and worst["same_rows"])


def apart(expected: Array, actual: Array) -> Array:
    """Relative differences; absolute ones where 0 is expected. NaN counts as infinitely far."""
    distance = np.abs(actual - expected) / np.where(expected == 0.0, 1.0, np.abs(expected))
    return np.nan_to_num(distance, nan=np.inf)

"""The statistics table: what it refuses, and its file. Damaged files: tests/unit/test_parsers_fuzz.py."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sensitivity.synthetic import make_table, with_experts
from snip_megatron.sensitivity.table import StatisticsTable


def table() -> StatisticsTable:
    return replace(make_table(layers=1), meta={"clip": 0.5})


def test_file_round_trip(tmp_path: Path) -> None:
    original, path = table(), tmp_path / "step_40.npz"
    original = with_experts(original)
    path.write_bytes(original.to_bytes())
    loaded = StatisticsTable.load(path)
    for name in ("step", "tokens", "tokens_per_step", "formats", "linears", "sinks", "meta"):
        assert getattr(loaded, name) == getattr(original, name), name
    assert loaded.arrays.keys() == original.arrays.keys()
    for name, array in original.arrays.items():
        np.testing.assert_array_equal(loaded.arrays[name], array, err_msg=name)
    assert [p.name for p in tmp_path.iterdir()] == ["step_40.npz"]  # nothing partial is left


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("linear.x2", np.ones(3)), ("linear.x2", np.ones(4, dtype=np.float32)), ("by_format.c2", np.ones((4, 3))),
        ("boundary.h2", np.ones(4)), ("drift2", np.ones((4, 5))), ("sink_w2", np.ones(1)),
    ],
)  # fmt: skip
def test_wrong_shapes_and_dtypes_are_refused(name: str, value: np.ndarray) -> None:
    statistics = table()
    with pytest.raises(ValueError, match=f"statistics {name}"):
        replace(statistics, arrays={**statistics.arrays, name: value})


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1e-30])
def test_non_finite_names_column_and_linear(bad: float) -> None:
    statistics = table()
    statistics.linear["gw2"][2] = bad
    statistics.by_format["c2"][1, 1] = bad
    statistics.boundary["h2"][2] = bad
    statistics.arrays["drift2"][0, 7] = bad
    statistics.arrays["sink_drift2"][1, 0] = bad
    assert statistics.non_finite() == [
        "linear.gw2 at decoder.layers.0.mlp.linear_fc1",
        "by_format.c2 at decoder.layers.0.self_attention.linear_proj",
        "boundary.h2 at 2",
        "drift2 at decoder.layers.0.self_attention.linear_qkv",
        "sink_drift2 at 1",
    ]

"""The statistics table: what it refuses, and its file: nothing but a SnipError comes out of a bad one."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sensitivity.synthetic import make_table, with_experts
from snip_megatron.precision.errors import SnipError
from snip_megatron.sensitivity.table import StatisticsTable


def table() -> StatisticsTable:
    return replace(make_table(layers=1), meta={"clip": 0.5})


VALID = table().to_bytes()


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
        ("linear.x2", np.ones(3)),
        ("linear.x2", np.ones(4, dtype=np.float32)),
        ("by_format.c2", np.ones((4, 3))),
        ("boundary.h2", np.ones(4)),
        ("drift2", np.ones((4, 5))),
        ("sink_w2", np.ones(1)),
    ],
)
def test_wrong_shapes_and_dtypes_are_refused(name: str, value: np.ndarray) -> None:
    one = table()
    with pytest.raises(ValueError, match=f"statistics {name}"):
        replace(one, arrays={**one.arrays, name: value})


# -- finite ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1e-30])
def test_non_finite_names_column_and_linear(bad: float) -> None:
    one = table()
    one.linear["gw2"][2] = bad
    one.by_format["c2"][1, 1] = bad
    one.boundary["h2"][2] = bad
    one.arrays["drift2"][0, 7] = bad
    one.arrays["sink_drift2"][1, 0] = bad
    assert one.non_finite() == [
        "linear.gw2 at decoder.layers.0.mlp.linear_fc1",
        "by_format.c2 at decoder.layers.0.self_attention.linear_proj",
        "boundary.h2 at 2",
        "drift2 at decoder.layers.0.self_attention.linear_qkv",
        "sink_drift2 at 1",
    ]


# -- files from outside ----------------------------------------------------------------------------------------
def load(content: bytes) -> StatisticsTable | str:
    """The table, or the message of the SnipError; anything else fails the test."""
    try:
        return StatisticsTable.from_bytes(content, where="s.npz")
    except SnipError as error:
        return str(error)


def with_header(**fields: Any) -> bytes:
    """The valid file with other header fields."""
    with np.load(io.BytesIO(VALID)) as data:
        arrays = {name: data[name] for name in data}
    header = {**json.loads(bytes(arrays["header"])), **fields}
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SnipError, match=r"absent\.npz: cannot be read"):
        StatisticsTable.load(tmp_path / "absent.npz")


@pytest.mark.parametrize(
    "fields",
    [
        {"schema": "snip.stats/2"},
        {"step": float("inf")},
        {"linears": []},
        {"linears": [["linear_fc9", 0, 1, 1]] * 4},
        {"linears": [["decoder.layers.0.mlp.linear_fc1", 0, 1]] * 4},
        {"sinks": [[1]]},
        {"formats": ["fp8"]},
        {"meta": {"clip": "much"}},
    ],
    ids=str,
)
def test_a_bad_header_is_one_line(fields: dict[str, Any]) -> None:
    message = load(with_header(**fields))
    assert isinstance(message, str)
    assert "\n" not in message


def test_a_linear_that_is_there_twice_is_named() -> None:
    with np.load(io.BytesIO(VALID)) as data:
        rows = json.loads(bytes(data["header"]))["linears"]
    message = load(with_header(linears=[rows[0], *rows[:-1]]))
    assert isinstance(message, str)
    assert f"{rows[0][0]} is there twice" in message


def test_pickles_are_not_opened() -> None:
    buffer = io.BytesIO()
    np.savez(buffer, header=np.array([{"a": 1}], dtype=object))
    assert "s.npz: not a statistics file" in str(load(buffer.getvalue()))

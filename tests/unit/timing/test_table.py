"""snip.timings/1: what is written is read again, anything else is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snip_megatron.errors import SnipError
from snip_megatron.timing.collectives import Exchange
from snip_megatron.timing.loading import TIMINGS
from snip_megatron.timing.table import Launching, TimingTable

from .timing_tables import formula_table

TABLE = formula_table(features=(512, 4096))
LAUNCHED = replace(
    TABLE,
    launching=Launching("local", dict.fromkeys(TABLE.formats, 2e-3), microbatch=5e-4, step=1e-3),
    launching_over_ranks={
        ranks: Launching("local", dict.fromkeys(TABLE.formats, 1e-3 * ranks), microbatch=5e-4, step=1e-3)
        for ranks in (2, 8)
    },
    recapture=0.05,
    memory=8e10,
    collectives={Exchange("all_gather", "uint8", 2, 4096): 2e-5, Exchange("reduce_scatter", "bf16", 2, 4096): 3e-5},
)
BODY: dict[str, Any] = json.loads(LAUNCHED.to_json())


def test_round_trip() -> None:
    assert TimingTable.from_json(TABLE.to_json()) == TABLE
    assert (TABLE.launching, TABLE.recapture, TABLE.collectives) == (None, None, {})
    assert TimingTable.from_json(LAUNCHED.to_json()) == LAUNCHED


def test_a_table_without_attention_copy_and_host_is_a_table() -> None:
    body = {key: value for key, value in BODY.items() if key not in ("attention", "copy_rate", "host", "date")}
    table = TimingTable.from_json(json.dumps(body))
    assert (table.attention, table.copy_rate, table.host) == ({}, None, {})


def test_several_ranks_have_the_host_seconds_of_the_nearest_measured_number() -> None:
    for ranks, expected in ((1, 1), (2, 2), (3, 2), (4, 2), (5, 8), (64, 8)):
        found = LAUNCHED.launching_of(ranks)
        of_one = LAUNCHED.launching
        assert found == (expected, of_one if expected == 1 else LAUNCHED.launching_over_ranks[expected])
    assert replace(LAUNCHED, launching_over_ranks={}).launching_of(8) == (1, LAUNCHED.launching)
    assert replace(LAUNCHED, launching=None).launching_of(1) is None
    assert TABLE.launching_of(2) is None


def changed(path: tuple[str | int, ...], value: Any) -> str:
    body = json.loads(json.dumps(BODY))
    place = body
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(body)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema",), "snip.timings/2", 't.json: schema: must be "snip.timings/1"'),
        (("device",), "", "t.json: device: must be a non-empty string"),
        (("collectives",), {}, "t.json: collectives: must be an array of objects"),
        (("collectives", 0, "collective"), "send", "t.json: collectives[0].collective: must be one of all_gather,"),
        (("collectives", 0, "dtype"), "fp8", "t.json: collectives[0].dtype: must be one of bf16, uint8, got 'fp8'"),
        (("collectives", 0, "bytes"), 0, "t.json: collectives[0].bytes: must be a whole number of 1 or more"),
        (("collectives", 1, "seconds"), 0, "t.json: collectives[1].seconds: must be a number from 1e-12 to"),
        (("formats",), ["fp8"], "t.json: formats: must name bf16, and each format once"),
        (("formats", 1), "fp9", "t.json: formats: unknown format 'fp9'"),
        (("gemms",), [], "t.json: gemms: must hold at least one row"),
        (("gemms",), {}, "t.json: gemms: must be an array of objects"),
        (("gemms", 0, "n"), 0, "t.json: gemms[0].n: must be a whole number of 1 or more, got 0"),
        (("gemms", 0, "n"), True, "t.json: gemms[0].n: must be a whole number"),
        (("gemms", 0, "seconds", "fp8"), ..., "t.json: gemms[0].seconds.fp8: missing"),
        (("gemms", 0, "seconds", "fp8", 2), -1.0, "t.json: gemms[0].seconds.fp8[2]: must be a number from 1e-12 to"),
        (("gemms", 0, "seconds", "fp8"), [1.0], "t.json: gemms[0].seconds.fp8: must be an array of three"),
        (("gemms", 1), BODY["gemms"][0], "t.json: gemms[1]: 1024 × 512 × 512 stands twice"),
        (("activations", 0, "gradient"), ..., "t.json: activations[0].gradient: must be an object"),
        (("weights", 0, "seconds", "fp8"), 5e-324, "t.json: weights[0].seconds.fp8: must be a number from 1e-12 to"),
        (("weights", 0, "seconds", "fp4"), "fast", "t.json: weights[0].seconds.fp4: must be a number"),
        (("copy_rate",), 0, "t.json: copy_rate: must be a number from 1 to"),
        (("host", "fp8"), ..., "t.json: host.fp8: missing"),
        (("launching", "layer", "fp4"), ..., "t.json: launching.layer.fp4: missing"),
        (("launching", "layers"), "", "t.json: launching.layers: must be a non-empty string"),
        (("launching", "step"), 0, "t.json: launching.step: must be a number from 1e-12 to"),
        (("launching",), [], "t.json: launching: must be an object"),
        (("launching_over_ranks", 0, "ranks"), 0, "t.json: launching_over_ranks[0].ranks: must be a whole number"),
        (("launching_over_ranks", 1, "step"), 0, "t.json: launching_over_ranks[1].step: must be a number from 1e-12"),
        (("recapture",), -1, "t.json: recapture: must be a number from 1e-12 to"),
        (("attention", 0, "backward"), None, "t.json: attention[0].backward: must be a number"),
    ],
)
def test_refusals(path: tuple[str | int, ...], value: Any, message: str) -> None:
    with pytest.raises(SnipError) as error:
        TimingTable.from_json(changed(path, value), where="t.json")
    assert str(error.value).startswith(message)


def test_not_a_number_is_refused() -> None:
    text = changed(("gemms", 0, "seconds", "fp8", 0), "@").replace('"@"', "NaN")
    with pytest.raises(SnipError, match="must be a number from 1e-12 to"):
        TimingTable.from_json(text)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_refusal(content: bytes) -> None:
    with pytest.raises(SnipError):
        TimingTable.from_json(content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def paths(value: Any, here: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here] * bool(here) + [path for key, inner in items for path in paths(inner, (*here, key))]


@given(st.sampled_from(paths(BODY)), JSON)
def test_a_value_replaced_by_any_other_gives_a_table_or_one_line(path: tuple[str | int, ...], value: Any) -> None:
    text = changed(path, value)
    refusal = refused(text)
    if refusal is None:
        table = TimingTable.from_json(text)
        assert TimingTable.from_json(table.to_json()).gemms == table.gemms
    else:
        assert refusal.startswith("t.json: ")
        assert "\n" not in refusal


def refused(text: str) -> str | None:
    """The refusal of ``t.json``, or None."""
    try:
        TimingTable.from_json(text, where="t.json")
    except SnipError as error:
        return str(error)
    return None


@given(st.integers(0, len(TABLE.to_json()) - 2))
def test_a_truncated_file_is_refused(end: int) -> None:
    with pytest.raises(SnipError, match="not JSON"):
        TimingTable.from_json(TABLE.to_json()[:end])


def test_files(tmp_path: Path) -> None:
    with pytest.raises(SnipError, match="cannot be read: No such file"):
        TimingTable.load(tmp_path / "none.json")
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(100 << 20)
    with pytest.raises(SnipError, match="larger than 64 MiB"):
        TimingTable.load(large)


@pytest.mark.parametrize("path", sorted(TIMINGS.glob("*.json")), ids=lambda path: path.stem)
def test_packaged_tables_say_where_they_come_from(path: Path) -> None:
    table = TimingTable.load(path)
    assert table.device.lower().endswith(path.stem)
    assert {"date", "commit", "command", "versions"} <= set(table.about)
    assert table.copy_rate is not None

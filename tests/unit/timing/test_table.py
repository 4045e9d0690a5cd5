"""snip.timings/1: what is written is read again, anything else is refused in one line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from refusal import refusal

from snip_megatron.precision.errors import SnipError
from snip_megatron.timing.table import TIMINGS, TimingTable, packaged_table

from .timing_tables import formula_table

TABLE = formula_table(features=(512, 4096))
FULL = replace(TABLE, memory=8e10)
BODY: dict[str, Any] = json.loads(FULL.to_json())


def test_round_trip() -> None:
    assert TimingTable.from_json(TABLE.to_json()) == TABLE
    assert TimingTable.from_json(FULL.to_json()) == FULL


def test_a_table_without_attention_and_copy_is_a_table() -> None:
    body = {key: value for key, value in BODY.items() if key not in ("attention", "copy_rate", "date")}
    table = TimingTable.from_json(json.dumps({key: value for key, value in body.items() if key != "grouped"}))
    assert (table.grouped, table.attention, table.copy_rate) == ({}, {}, None)


def test_what_earlier_tables_had_is_passed_over() -> None:
    old = BODY | {
        "host": {"bf16": 1e-4},
        "recapture": 0.05,
        "launching": {"layers": "local", "layer": {}, "microbatch": 1e-3, "step": 1e-3},
        "collectives": [{"collective": "all_gather", "dtype": "uint8", "ranks": 2, "bytes": 4096, "seconds": 2e-5}],
    }
    assert TimingTable.from_json(json.dumps(old)) == FULL


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
        (("formats",), ["fp8"], "t.json: formats: must name bf16, and each format once"),
        (("formats", 1), "fp9", "t.json: formats[1]: 'fp9' is not one of bf16, fp8"),
        (("gemms",), [], "t.json: gemms: must hold at least one row"),
        (("gemms", 0, "n"), 0, "t.json: gemms[0].n: must be an integer, 1 or more"),
        (("gemms", 0, "seconds", "fp8"), ..., "t.json: gemms[0].seconds.fp8: missing"),
        (("gemms", 0, "seconds", "fp8", 2), -1.0, "t.json: gemms[0].seconds.fp8[2]: must be a number from 1e-12 to"),
        (("gemms", 0, "seconds", "fp8"), [1.0], "t.json: gemms[0].seconds.fp8: must be an array of three"),
        (("gemms", 1), BODY["gemms"][0], "t.json: gemms[1]: 1024 × 512 × 512 stands twice"),
        (("weights", 0, "seconds", "fp8"), 5e-324, "t.json: weights[0].seconds.fp8: must be a number from 1e-12 to"),
        (("grouped", 0, "experts"), 0, "t.json: grouped[0].experts: must be an integer, 1 or more"),
        (("grouped", 0, "input", "fp8"), [1.0], "t.json: grouped[0].input.fp8: must be an array of three"),
        (("copy_rate",), 0, "t.json: copy_rate: must be a number from 1 to"),
    ],
)
def test_refusals(path: tuple[str | int, ...], value: Any, message: str) -> None:
    assert refusal(TimingTable.from_json, changed(path, value), where="t.json").startswith(message)


def test_files(tmp_path: Path) -> None:
    with pytest.raises(SnipError, match="cannot be read: No such file"):
        TimingTable.load(tmp_path / "none.json")


@pytest.mark.parametrize("path", sorted(TIMINGS.glob("*.json")), ids=lambda path: path.stem)
def test_packaged_tables_say_where_they_come_from(path: Path) -> None:
    table = TimingTable.load(path)
    assert packaged_table(table.device) == path
    assert {"date", "commit", "command", "versions"} <= set(table.about)
    assert table.copy_rate is not None

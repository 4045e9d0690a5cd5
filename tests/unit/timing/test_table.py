"""snip.timings/1: what is written is read again, anything else is refused in one line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from damage import changed
from refusal import refusal

from snip_megatron.timing.table import TIMINGS, TimingTable, packaged_table

from .timing_tables import formula_table

TABLE = formula_table(features=(512, 4096))
FULL = replace(TABLE, memory=8e10)
BODY: dict[str, Any] = json.loads(FULL.to_json())


def test_a_table_without_attention_and_copy_is_a_table() -> None:
    body = {key: value for key, value in BODY.items() if key not in ("attention", "copy_rate", "date")}
    table = TimingTable.from_json(json.dumps({key: value for key, value in body.items() if key != "grouped"}))
    assert (table.grouped, table.attention, table.copy_rate) == ({}, {}, None)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", "snip.timings/2", 't.json: schema: must be "snip.timings/1"'),
        ("formats", ["fp8"], "t.json: formats: must name bf16, and each format once"),
        ("formats[1]", "fp9", "t.json: formats[1]: 'fp9' is not one of bf16, fp8"),
        ("gemms[0].seconds.fp8", ..., "t.json: gemms[0].seconds.fp8: missing"),
        ("gemms[0].seconds.fp8[2]", -1.0, "t.json: gemms[0].seconds.fp8[2]: must be a number from 1e-12 to"),
        ("gemms[1]", BODY["gemms"][0], "t.json: gemms[1]: 1024 × 512 × 512 stands twice"),
    ],
)
def test_refusals(path: str, value: Any, message: str) -> None:
    assert refusal(TimingTable.from_json, changed(BODY, path, value), where="t.json").startswith(message)


@pytest.mark.parametrize("path", sorted(TIMINGS.glob("*.json")), ids=lambda path: path.stem)
def test_packaged_tables_say_where_they_come_from(path: Path) -> None:
    table = TimingTable.load(path)
    assert packaged_table(table.device) == path
    assert {"date", "commit", "command", "versions"} <= set(table.about)
    assert table.copy_rate is not None

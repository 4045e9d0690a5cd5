"""Reads an offline run's ``.wandb`` file: LevelDB's log format around wandb's own protobuf records."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE_HEADER, BLOCK, RECORD_HEADER = 7, 32768, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def raw_records(data: bytes) -> Iterator[bytes]:
    assert data[:4] == b":W&B"
    position, parts = FILE_HEADER, b""
    while position + RECORD_HEADER <= len(data):
        free_bytes = BLOCK - position % BLOCK
        if free_bytes < RECORD_HEADER:
            position += free_bytes
            continue
        length = int.from_bytes(data[position + 4 : position + 6], "little")
        kind = data[position + 6]
        parts += data[position + RECORD_HEADER : position + RECORD_HEADER + length]
        position += RECORD_HEADER + length
        assert kind in (FULL, FIRST, MIDDLE, LAST)
        if kind in (FULL, LAST):
            yield parts
            parts = b""


def history(path: Path) -> list[dict[str, Any]]:
    """The rows of the run's history, keys dotted by ``/`` as logged."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for raw in raw_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(raw)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows

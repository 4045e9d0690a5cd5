"""docs/file-formats.md: its examples are read by the package's own readers, and no schema and no event is left out."""

import json
import re
from pathlib import Path

import pytest

from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.phases import PrecisionPlan, Schedule
from snip_megatron.solver import Problem
from snip_megatron.timing.table import TimingTable

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "file-formats.md").read_text(encoding="utf-8")
EXAMPLES = {json.loads(text)["schema"]: text for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)}
READERS = {
    "snip.problem/1": Problem.from_json,
    "snip.problem/2": Problem.from_json,
    "snip.map/1": PrecisionMap.from_json,
    "snip.schedule/1": Schedule.from_json,
    "snip.phases/1": PrecisionPlan.from_json,
    "snip.timings/1": TimingTable.from_json,
}
SOURCES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "snip_megatron").rglob("*.py")}


def test_there_is_an_example_for_every_reader() -> None:
    assert set(EXAMPLES) == set(READERS)


@pytest.mark.parametrize("schema", READERS)
def test_an_example_is_read_and_written_with_the_same_fields(schema: str) -> None:
    written = json.loads(READERS[schema](EXAMPLES[schema]).to_json())
    assert set(written) == set(json.loads(EXAMPLES[schema]))


def test_every_schema_is_listed() -> None:
    schemas = {name for text in SOURCES.values() for name in re.findall(r'"(snip\.[a-z]+/\d)"', text)}
    assert len(schemas) >= 15
    assert not {name for name in schemas - {"snip.venv/1"} if f"`{name}`" not in PAGE}


def test_every_event_is_listed() -> None:
    rooms = ("runtime", "records", "megatron")
    texts = [text for path, text in SOURCES.items() if path.relative_to(ROOT / "snip_megatron").parts[0] in rooms]
    events = {name for text in texts for name in re.findall(r'event\(\s*\w+,\s*"(\w+)"', text)}
    assert {"adopt", "submit", "solved", "resume", "guard"} <= events
    assert not {name for name in events if f"`{name}`" not in PAGE}

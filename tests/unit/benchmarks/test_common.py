"""Result files: a line for each field, and for each run."""

import json

from benchmarks.common import result_text


def test_long_lists_of_objects_have_a_line_an_entry_and_the_rest_a_line_a_field() -> None:
    runs = [{"id": number, "losses": [0.1] * 20} for number in range(3)]
    result = {"device": "H200", "ms": {"bf16": 1.5}, "runs": runs, "by name": {"a": runs, "b": {}}, "long": [1] * 99}
    text = result_text(result)
    assert json.loads(text) == result
    lines = text.splitlines()
    assert len(lines) == 2 + 3 + (2 + 3) + (2 + 2)
    assert [json.loads(line.strip().rstrip(",")) for line in lines[4:7]] == runs

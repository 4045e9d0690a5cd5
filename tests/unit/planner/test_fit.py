"""Whether a plan fits into the memory of a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from snip_megatron.tools.cli import main

GIB = 2**30


def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    out = tmp_path / "plan.json"
    code = main(["plan", "--model", "1b", "--json", str(out), *arguments])
    memory: dict[str, Any] = json.loads(out.read_text())["memory"]
    assert code == (0 if memory["fits"] else 3)
    return memory, capsys.readouterr().out


@pytest.mark.parametrize(
    ("factor", "line"), [(0.99, "does not fit: the map needs"), (1.05, "little for what is not counted"), (1.2, None)]
)
def test_a_given_memory_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], factor: float, line: str | None
) -> None:
    peak = plan(tmp_path, capsys)[0]["peak"] / GIB
    memory, text = plan(tmp_path, capsys, "--gpu-memory", str(factor * peak))
    assert memory["fits"] is (factor > 1)
    assert (line or f"GiB of the {factor * peak:.1f} that a GPU has\n") in text

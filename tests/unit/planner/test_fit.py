"""Whether a plan fits into the memory of a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from snip_megatron.timing.cost_model import load_cost_model
from snip_megatron.tools.cli import main

GIB = 2**30


def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    out = tmp_path / "plan.json"
    assert main(["plan", "--model", "1b", "--json", str(out), *arguments]) == 0
    memory: dict[str, Any] = json.loads(out.read_text())["memory"]
    return memory, capsys.readouterr().out


def test_the_table_of_the_gpu_says_what_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory, text = plan(tmp_path, capsys)
    assert memory["gpu"] == load_cost_model("h200").table.memory  # type: ignore[attr-defined]
    assert 139 * GIB <= memory["gpu"] < 141 * GIB  # an H200's
    assert memory["fits"] is True
    assert memory["peak"] > 12 * 1.1e9
    needs, has = (f"{memory[name] / GIB:.1f}" for name in ("peak", "gpu"))
    assert f"fits: the map needs {needs} GiB of the {has} that a GPU has\n" in text


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

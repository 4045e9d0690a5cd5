"""The table of launch/README.md says what ``snip plan`` says today."""

from __future__ import annotations

from pathlib import Path

import pytest

from snip_megatron.errors import SnipError
from snip_megatron.launch import figures
from snip_megatron.launch.configurations import CONFIGURATIONS

PAGE = Path(__file__).resolve().parents[3] / "launch" / "README.md"


def test_the_page_is_up_to_date() -> None:
    """Else: python -m snip_megatron.launch.figures launch/README.md."""
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index(figures.BEGIN) : text.index(figures.END)]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(CONFIGURATIONS)
    assert figures.renewed(text) == text


def test_an_old_page_is_told_and_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "table", lambda: f"{figures.BEGIN}\nnew\n{figures.END}")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{figures.BEGIN}\nold\n{figures.END}\nafter\n")
    assert figures.main([str(page), "--check"]) == 1
    assert "old" in page.read_text()
    assert figures.main([str(page)]) == 0
    assert page.read_text() == f"before\n{figures.BEGIN}\nnew\n{figures.END}\nafter\n"
    assert figures.main([str(page), "--check"]) == 0
    page.write_text("no marks\n")
    assert figures.main([str(page)]) == 2
    assert figures.main([str(tmp_path / "none.md")]) == 2
    assert capsys.readouterr().err.count("\n") == 2
    with pytest.raises(SnipError, match="has no marks"):
        figures.renewed("x")

"""What an output file is refused for before a command computes anything."""

import os
from pathlib import Path

import pytest

from snip_megatron.errors import SnipError
from snip_megatron.records.storage import check_folder, deliver


def test_a_file_that_cannot_be_written_is_refused_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, why in ((tmp_path, "is a folder; name a file"), (tmp_path / "a" / "b", "there is no folder")):
        with pytest.raises(SnipError, match=f"^--out {path}: {why}"):
            check_folder("--out", path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(SnipError, match=f"^--out {tmp_path}/map.json: the folder {tmp_path} cannot be written"):
        check_folder("--out", tmp_path / "map.json")


def test_a_name_that_no_folder_can_hold_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SnipError, match=r": there is no folder "):
        check_folder("--out", tmp_path / (300 * "x") / "map.json")
    path = tmp_path / (300 * "x")
    check_folder("--out", path)
    with pytest.raises(SnipError, match=r": cannot be written: File name too long$"):
        deliver("--out", path, "")


def test_a_new_file_in_a_folder_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_folder("--out", Path("map.json"))
    check_folder("--out", Path("/dev/null"))
    check_folder("--out", None)

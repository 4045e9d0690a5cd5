"""Writes that fail in the run directory, and output files that a command refuses before it computes anything."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from small_runs import FC1, new_run

from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime import storage
from snip_megatron.runtime.run_data import read_maps
from snip_megatron.runtime.storage import check_folder, deliver


def test_two_writers_of_one_file_leave_one_of_their_files(tmp_path):
    """A temporary name that both share would mix their bytes, or be gone when the second one renames it."""
    contents = [bytes([letter]) * 300_000 for letter in b"ab"]

    def write(data: bytes) -> None:
        for _ in range(100):
            storage.write_atomically(tmp_path / "file", data, durable=False)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, contents))
    assert (tmp_path / "file").read_bytes() in contents
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_file_that_is_not_on_the_disk_replaces_nothing(tmp_path, monkeypatch):
    """The rename could reach the disk before the bytes: after a loss of power the file would be empty."""

    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, "I/O error")

    storage.write_atomically(tmp_path / "file", b"old")
    monkeypatch.setattr(storage.os, "fsync", refuse)
    with pytest.raises(OSError, match="I/O error"):
        storage.write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_file_in_the_way_holds_back_only_itself(tmp_path, capsys):
    run = new_run(tmp_path)
    blocked = tmp_path / "maps" / "step_0.json"
    (blocked / "x").mkdir(parents=True)
    run.write("maps", 0, PrecisionMap.uniform([FC1], Format.FP4).to_json())
    run.write("maps", 4, PrecisionMap.uniform([FC1], Format.FP8).to_json())
    run.writer.drain(force=True)
    assert (tmp_path / "maps" / "step_4.json").exists()
    (blocked / "x").rmdir()
    blocked.rmdir()
    run.close()
    assert list(read_maps(tmp_path)) == [0, 4]
    assert capsys.readouterr().err.count("\n") == 1


def test_pending_writes_are_bounded_and_the_loss_is_said(tmp_path, monkeypatch, capsys):
    def refuse(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage, "MAX_PENDING_BYTES", 1000)
    run = new_run(tmp_path)
    monkeypatch.setattr(storage.os, "write", refuse)
    for step in range(100):
        run.event(step, "collect", seconds=0.1)
    assert 80 <= run.writer.lost < 100
    assert capsys.readouterr().err.count("the oldest are lost from now on") == 1  # hours before the end
    run.close()
    assert run.writer.lost == 100
    assert "100 records were lost" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, why in ((tmp_path, "is a folder; name a file"), (tmp_path / "a" / "b", "there is no folder")):
        with pytest.raises(SnipError, match=f"^--out {path}: {why}"):
            check_folder("--out", path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(SnipError, match=f"^--out {tmp_path}/map.json: the folder {tmp_path} cannot be written"):
        check_folder("--out", tmp_path / "map.json")


def test_output_files_that_can_be_written_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (Path("map.json"), Path("/dev/null"), None):
        check_folder("--out", path)
    deliver("--out", Path("/dev/null"), "text")
    assert not Path("/dev/null").is_file()
    with pytest.raises(SnipError, match=r": cannot be written: File name too long$"):
        deliver("--out", tmp_path / (300 * "x"), "")

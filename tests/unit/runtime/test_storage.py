"""Writes that fail in the run directory, and output files that a command refuses before it computes anything."""

import contextlib
import errno
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from small_runs import CONFIG, FC1, new_run

from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.precision.errors import SnipError
from snip_megatron.reporting.summary import sentences, summarise
from snip_megatron.runtime import storage
from snip_megatron.runtime.run_data import load_run, read_config, read_events, read_maps, read_metrics
from snip_megatron.runtime.storage import check_folder, deliver


def test_two_writers_of_one_file_leave_one_of_their_files(tmp_path):
    """A temporary name that both share would mix their bytes, or be gone when the second one renames it."""
    contents = [bytes([letter]) * 300_000 for letter in b"ab"]

    def write(data: bytes) -> None:
        for _ in range(100):
            storage.write_atomically(tmp_path / "file", data)

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


def end_of_stall(fifo: Path) -> int:
    """Open a FIFO for reading, so that no write to it waits any more. Returns the descriptor."""
    return os.open(fifo, os.O_RDWR | os.O_NONBLOCK)


def test_a_write_that_stalls_holds_up_nobody(tmp_path, monkeypatch, capsys):
    """The open of a FIFO waits in the kernel for a reader, as a file of a dead network file system does."""
    monkeypatch.setattr(storage, "MAX_RECORDS", 25)
    monkeypatch.setattr(storage, "STALL_S", 0.0)
    run, fifo = new_run(tmp_path), tmp_path / "metrics.jsonl"
    os.mkfifo(fifo)
    run.event(0, "submit", version=1)
    assert run.writer.flush()
    for step in range(100):
        run.metric(step, loss=1.0, grad_norm=1.0, fp4_fraction=0.0)
        run.event(step, "collect")
    assert [event["event"] for event in read_events(tmp_path)] == ["submit"]
    reader = end_of_stall(fifo)
    assert run.writer.flush()
    lines = os.read(reader, 2**16).splitlines()
    (event,) = [event for event in read_events(tmp_path) if event["event"] == "records_lost"]
    assert event["kinds"] == {"metrics": 75, "events": 75}
    assert (event["records"], event["step"]) == (150, 99)
    run.close()
    os.close(reader)
    fifo.unlink()
    summary = summarise(load_run(tmp_path))
    assert summary.as_dict()["lost"] == event["kinds"]
    assert sentences(summary)[-1].endswith("did not take them: 75 of metrics, 75 of events.")
    assert [json.loads(line)["step"] for line in lines] == [*range(25)]
    assert [event["step"] for event in read_events(tmp_path) if event["event"] == "collect"] == [*range(25)]
    said = capsys.readouterr().err
    assert said.count("nothing could be written for 0 s") == said.count("further records are lost") == 1
    assert "writes again; 150 records (75 of metrics, 75 of events) are missing" in said


def test_the_end_of_a_run_waits_a_bounded_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(storage, "EXIT_S", 0.1)
    run, fifo, reports = new_run(tmp_path), tmp_path / "metrics.jsonl", list[Path]()
    os.mkfifo(fifo)
    for step in range(3):
        run.metric(step, loss=1.0, grad_norm=1.0, fp4_fraction=0.0)
        run.event(step, "collect")
    run.close(reports.append)
    said = capsys.readouterr()
    assert (
        "6 records (3 of metrics, 3 of events) are missing: the file system has not taken them within 0 s" in said.err
    )
    assert f"snip report {tmp_path}" in said.out
    os.close(end_of_stall(fifo))
    assert reports == []


def mounted(folder: Path, *options: str) -> None:
    process = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)], capture_output=True
    )
    if process.returncode:
        pytest.skip(f"a file system can be mounted by root alone: {process.stderr.decode().strip()}")


@pytest.mark.parametrize("fault", ["full", "read-only", "gone"])
def test_records_come_back_with_their_file_system(tmp_path, fault):
    folder = tmp_path / "mount"
    folder.mkdir()
    mounted(folder, "size=64k")
    try:
        run = new_run(folder / "run")
        if fault == "full":
            with contextlib.suppress(OSError):
                (folder / "filler").write_bytes(bytes(2**16))
        if fault == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        if fault == "gone":
            run.metric(0, loss=1.0, grad_norm=1.0, fp4_fraction=0.0)
            assert run.writer.flush()
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        for step in range(1, 10):
            run.metric(step, loss=1.0, grad_norm=1.0, fp4_fraction=0.0)
            run.write("maps", step, PrecisionMap.uniform([FC1], Format.FP4).to_json())
        assert run.writer.flush()
        assert read_metrics(folder / "run") == [] or fault == "gone"
        if fault == "full":
            (folder / "filler").unlink()
        if fault == "read-only":
            subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
        run.close()
        assert [record["step"] for record in read_metrics(folder / "run")] == [*range(1, 10)]
        assert list(read_maps(folder / "run")) == [*range(1, 10)]
        assert read_config(folder / "run")["config"] == CONFIG
        assert read_events(folder / "run") == []
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)


def test_a_file_that_can_never_be_written_holds_back_no_other(tmp_path, monkeypatch, capsys):
    """A folder has the name of a map, and another one that of the metrics. Both are gone at the end."""
    monkeypatch.setattr(storage, "MAX_RECORDS", 20)
    run = new_run(tmp_path)
    bad = [tmp_path / "maps" / "step_2.json", tmp_path / "metrics.jsonl"]
    for path in bad:
        (path / "entry").mkdir(parents=True)
    for step in range(100):
        run.metric(step, loss=1.0, grad_norm=1.0, fp4_fraction=0.0)
        if step < 10:
            run.write("maps", step, PrecisionMap.uniform([FC1], Format.FP4).to_json())
        run.event(step, "collect")
        assert step % 5 or run.writer.flush()
    assert run.writer.flush()
    assert {path.stem for path in (tmp_path / "maps").iterdir() if path.is_file()} == {
        f"step_{step}" for step in range(10) if step != 2
    }
    assert [(event["step"], event["event"]) for event in read_events(tmp_path)] == [(s, "collect") for s in range(100)]
    for path in bad:
        (path / "entry").rmdir()
        path.rmdir()
    run.close()
    assert [record["step"] for record in read_metrics(tmp_path)] == [*range(20)]
    assert list(read_maps(tmp_path)) == [*range(10)]
    lost = [event["kinds"] for event in read_events(tmp_path) if event["event"] == "records_lost"]
    assert sum(kinds["metrics"] for kinds in lost) == 80
    assert capsys.readouterr().err.count("cannot write (") == 1


def test_what_waits_is_bounded_in_bytes_and_said_at_the_end(tmp_path, monkeypatch, capsys):
    def refuse(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage, "MAX_BYTES", 1000)
    run = new_run(tmp_path)
    monkeypatch.setattr(storage.os, "write", refuse)
    for step in range(100):
        run.event(step, "collect", seconds=0.1)
    run.close()
    said = capsys.readouterr().err
    assert said.count("further records are lost") == 1  # hours before the end
    assert "100 records (100 of events) are missing: [Errno 28] No space left" in said


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

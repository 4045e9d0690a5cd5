"""The runner of ``tests/gpu`` counts every test, whatever ends it, and leaves no process behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

GPU = Path(__file__).resolve().parents[1] / "gpu"
sys.path[:0] = [str(GPU), str(GPU.parent / "distributed")]
import gpu_suite  # noqa: E402
from launch import cpu_environment  # noqa: E402

TESTS = {
    "whole": """
import pytest
def test_passes(): pass
def test_fails(): assert 1 == 2, "because"
@pytest.fixture
def broken(): raise OSError("no such card")
def test_has_no_card(broken): pass
@pytest.mark.skip(reason="needs two GPUs")
def test_skipped(): pass
@pytest.mark.alone
def test_another_time(): pass
""",
    "dies": """
import os
def test_before(): pass
def test_dies(): os._exit(3)
def test_after(): pass
""",
    "hangs": """
import subprocess, sys, time
def test_hangs():
    subprocess.run([sys.executable, "-c", "import time; time.sleep(600)", __file__], start_new_session=True)
""",
}


def test_every_test_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setenv("GPU_SUITE_WORK", str(work))
    files = []
    for name, text in TESTS.items():
        files.append(tmp_path / f"test_{name}.py")
        files[-1].write_text(text)
    *shards, hanging, late = [gpu_suite.Shard([file], "not alone") for file in (*files, files[0])]
    gpu_suite.run(shards, 2, time.monotonic() + 120.0, work, [])
    gpu_suite.run([hanging], 1, time.monotonic() + 4.0, work, [])
    gpu_suite.run([late], 1, time.monotonic(), work, [])
    assert hanging.ended()
    results = [entry for shard in [*shards, hanging, late] for entry in shard.results()]
    assert gpu_suite.summary(results) == {
        "passed": 2, "failed": 1, "errors": 1 + 2 + 1 + 1, "skipped": {"needs two GPUs": 1},
    }  # fmt: skip
    assert any("because" in entry["text"] for entry in results)
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(files[2]).encode() in _read(path)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


FORKED = """
import pathlib, sys
from forked_ranks import can_fork, run_ranks
from launch import tiny_llama_args
if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    print("forks:", can_fork())
    arguments = tiny_llama_args("--num-layers", "2", "--save", str(folder / "saved"), "--save-interval", "4", iters=4)
    for ranks, module in ((2, "snip_megatron.pretrain_gpt"), (1, "no_such_module")):
        outputs = [(folder / f"out{rank}", folder / f"err{rank}") for rank in range(ranks)]
        print(run_ranks(ranks, module, arguments, folder=folder, outputs=outputs, environment={}, timeout=200))
"""


def test_ranks_are_forked_from_a_process_that_has_imported_the_entry(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(FORKED)
    folders = [GPU.parents[1], GPU, GPU.parent / "distributed", GPU.parent]
    environment = cpu_environment() | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run(
        [sys.executable, "main.py", str(tmp_path)], cwd=tmp_path, env=os.environ | environment, capture_output=True,
        text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["forks: True", "[0, 0]", "[1]"], done.stderr[-3000:]
    assert "iteration        4/" in (tmp_path / "out1").read_text()
    assert "No module named 'no_such_module'" in (tmp_path / "err0").read_text()

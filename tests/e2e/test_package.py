"""The wheel: what users who do not work in the repository get, and what it does without the packages of its extras."""

import os
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from rank_process import free_port

from snip_megatron.runtime.run_data import read_events
from snip_megatron.tools.doctor import EXTRAS, REQUIRED

ROOT = Path(__file__).resolve().parents[2]

# Hides packages from Python, as if they were not installed: a sitecustomize.py.
HIDE = """
import os, sys

hidden = set(os.environ["HIDDEN"].split(","))

class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] in hidden else self.finder.find_spec(name, *rest)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
"""
TINY = """
--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 64
--max-position-embeddings 64 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2
--global-batch-size 2
--lr 1e-3 --num-workers 0 --eval-iters 0 --eval-interval 1000 --train-iters 6
--mock-data --tokenizer-type NullTokenizer --vocab-size 255
--snip --snip-first-update 2 --snip-lag 2 --snip-wait 120 --snip-schedule auto --snip-dir run
"""
COMMANDS = "import sys; from snip_megatron.tools.cli import main; sys.exit(max(main(a.split()) for a in sys.argv[1:]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    shutil.copytree(ROOT / "snip_megatron", source / "snip_megatron", ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(source)], check=True, timeout=120)
    (result,) = folder.glob("*.whl")
    return result


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith("METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_wheel_holds_the_package_its_data_and_its_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    packaged = {path.relative_to(ROOT).as_posix() for path in (ROOT / "snip_megatron").rglob("*") if path.is_file()}
    packaged = {name for name in packaged if "__pycache__" not in name}
    assert packaged - names == set()
    assert any(name.endswith("report.html") for name in packaged)
    assert not any(name.startswith(("tests/", "scripts/")) for name in names)
    assert "snip = snip_megatron.tools.cli:main" in entry_points
    assert metadata(wheel)["License-Expression"] == "Apache-2.0"
    assert metadata(wheel)["Requires-Python"] == ">=3.12"


def test_only_what_a_training_imports_is_required(wheel: Path) -> None:
    """The doctor knows the same packages: those that fail a machine, and those of each extra."""
    required, extras = set(), {}
    for requirement in map(Requirement, metadata(wheel).get_all("Requires-Dist")):
        if requirement.marker is None or "extra" not in str(requirement.marker):
            required.add(f"{requirement.name}{requirement.specifier}")
        else:
            extra = str(requirement.marker).rpartition('"')[0].rpartition('"')[2]
            extras.setdefault(extra, set()).add(f"{requirement.name}{requirement.specifier}")
    assert {each for each in required if not each.startswith("triton")} == {f"{e.name}{e.specifier}" for e in REQUIRED}
    for each, extra, _ in EXTRAS:
        assert f"{each.name}{each.specifier}" in extras[extra]
        assert f"{each.name}{each.specifier}" in extras["all"] & extras["dev"]


def test_the_wheel_trains_and_names_what_is_missing_without_its_extras(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "sitecustomize.py").write_text(HIDE)
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONPATH")}
    hidden = ",".join(each.name for each, _, _ in EXTRAS)
    environment = inherited | {"PYTHONPATH": str(site), "HIDDEN": hidden, "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}  # as torchrun
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment)

    trained = python("-m", "snip_megatron.pretrain_gpt", *TINY.split())
    assert trained.returncode == 0, trained.stderr[-3000:]
    events = {kind: [e for e in read_events(tmp_path / "run") if e["event"] == kind] for kind in ("plan", "adopt")}
    assert events["plan"]  # solved by the packages that are required
    assert events["adopt"][0]["step"] == 4
    assert "snip: no report: a report needs plotly, which is not installed: pip install 'snip_megatron[report]'" in (
        trained.stdout
    )
    assert python("-c", "import snip_megatron.plain").returncode == 0
    commands = python("-c", COMMANDS, "report run", "prepare-data --output data")
    assert commands.returncode == 2
    assert [line for line in commands.stderr.splitlines() if line.startswith("snip ")] == [
        "snip report: a report needs plotly, which is not installed: pip install 'snip_megatron[report]'",
        "snip prepare-data: a tokenizer needs tokenizers, which is not installed: pip install 'snip_megatron[text]'",
    ]
    assert "Traceback" not in commands.stderr

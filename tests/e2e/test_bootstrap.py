"""scripts/bootstrap.sh: finding Python, the stamp, the lock, repair; real pip, a package without dependencies."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]

# A build backend inside the tree: pip needs no setuptools and no network. It can be made to hang in the middle.
BACKEND = """
import base64, hashlib, os, time, zipfile
from pathlib import Path

def build_editable(directory, config_settings=None, metadata_directory=None):
    while os.path.exists("hang"):
        time.sleep(0.1)
    name = "sample-1.0-py3-none-any.whl"
    files = {
        "sample.pth": os.getcwd() + "\\n",
        "sample-1.0.dist-info/METADATA": "Metadata-Version: 2.1\\nName: sample\\nVersion: 1.0\\n",
        "sample-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    record = "".join(f"{path},,\\n" for path in files)
    with zipfile.ZipFile(Path(directory) / name, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr("sample-1.0.dist-info/RECORD", record + "sample-1.0.dist-info/RECORD,,\\n")
    return name

def build_wheel(directory, config_settings=None, metadata_directory=None):
    raise RuntimeError("only editable")
"""
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with this one's bootstrap and a package that needs nothing."""
    root = tmp_path / "project"
    (root / "scripts").mkdir(parents=True)
    for name in ("bootstrap.sh", "bootstrap.py"):
        (root / "scripts" / name).write_bytes((ROOT / "scripts" / name).read_bytes())
    (root / "constraints.txt").write_text("# nothing is needed\n")
    (root / "setup.py").write_text("# requirements would stand here\n")
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "backend.py").write_text(BACKEND)
    return root


def environment(**extra: str) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SNIP_", "VIRTUAL_ENV"))}
    return {**inherited, "SNIP_PYTHON": sys.executable, **extra}


def bootstrap(project: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(project / "scripts" / "bootstrap.sh")]
    return subprocess.run(command, env=environment(**extra), capture_output=True, text=True, timeout=120)


def wait_for_pip(project: Path) -> None:
    """Wait until pip works on the package. It hangs there if the project says so."""
    log = project / ".venv" / "snip-install.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "Obtaining" in log.read_text()):
        assert time.monotonic() < deadline, "pip did not start"
        time.sleep(0.1)


def stamp(project: Path) -> Path:
    return project / ".venv" / "snip-stamp.json"


def test_installs_once_and_again_only_when_an_input_changes(project: Path) -> None:
    first = bootstrap(project)
    assert first.returncode == 0, first.stderr
    assert "snip: installed in" in first.stdout
    assert json.loads(stamp(project).read_text())["root"] == str(project)
    log = project / ".venv" / "snip-install.log"
    before = log.stat().st_mtime_ns

    # A second run is silent, installs nothing, and puts the environment first in the caller's PATH.
    script = f"source {project}/scripts/bootstrap.sh; type -P python; echo $VIRTUAL_ENV"
    script += "; python -c 'import sys; print(sys.dont_write_bytecode)'"
    inherited = environment() | {"PYTHONDONTWRITEBYTECODE": "1"}
    second = subprocess.run(["bash", "-c", script], env=inherited, capture_output=True, text=True, timeout=120)
    assert second.returncode == 0, second.stderr
    assert second.stdout.split() == [str(project / ".venv" / "bin" / "python"), str(project / ".venv"), "False"]
    assert log.stat().st_mtime_ns == before

    marker = project / ".venv" / "kept-by-an-update-in-place"
    marker.touch()
    (project / "constraints.txt").write_text("# another pin\n")
    third = bootstrap(project)
    assert third.returncode == 0, third.stderr
    assert log.stat().st_mtime_ns > before
    assert marker.exists()

    other = project.with_name("other")
    shutil.copytree(project, other, ignore=shutil.ignore_patterns(".venv*"))
    refused = bootstrap(other, SNIP_VENV=str(project / ".venv"))
    assert (refused.returncode, len(refused.stderr.splitlines())) == (1, 1)
    assert f"belongs to {project}" in refused.stderr
    assert stamp(project).exists()

    # An install that fails names the log, and leaves no stamp.
    (project / "constraints.txt").write_text("# a third pin\n")
    (project / "pyproject.toml").write_text(PYPROJECT.replace('"backend"', '"no_such_backend"'))
    failed = bootstrap(project)
    assert failed.returncode == 1
    assert f"the whole log: {project}/.venv/snip-install.log" in failed.stderr
    assert "Traceback" not in failed.stderr.splitlines()[-1]
    assert not stamp(project).exists()


def test_killed_run_leaves_its_pip_the_lock_and_is_repaired(project: Path) -> None:
    (project / "hang").touch()
    command = [sys.executable, "-I", str(project / "scripts" / "bootstrap.py")]
    killed = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
    wait_for_pip(project)
    killed.kill()
    killed.wait()
    assert not stamp(project).exists()
    remnant = project / ".venv" / "half"
    remnant.touch()

    second = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert "waiting for it" in second.stdout.readline()  # on the killed run's pip
    (project / "hang").unlink()
    output = second.communicate(timeout=120)[0]
    assert second.returncode == 0
    assert "interrupted; building it anew" in output
    assert stamp(project).exists()
    assert not remnant.exists()


def test_an_environment_of_the_user_is_left_alone(project: Path) -> None:
    (project / ".venv").mkdir()
    result = bootstrap(project)
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
    assert "was not made by scripts/bootstrap.sh" in result.stderr
    assert list((project / ".venv").iterdir()) == []


def run_with_path(project: Path, path: Path, home: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run the bootstrap with nothing but ``path`` in PATH and no other trace of an interpreter."""
    variables = {"PATH": str(path), "HOME": str(home), **extra}
    command = ["/bin/bash", str(project / "scripts" / "bootstrap.sh")]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)


def fake_python(path: Path, version: str) -> None:
    """An interpreter of another version: it answers the finder's question as that version would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = tuple(int(part) for part in version.split("."))
    program = (
        f'#!{sys.executable}\nimport sys\nsys.version_info = {numbers}\nexec(sys.argv[sys.argv.index("-c") + 1])\n'
    )
    path.write_text(program)
    path.chmod(0o755)


def test_an_old_python_and_a_shim_without_version_are_passed_over(project: Path, tmp_path: Path) -> None:
    path = tmp_path / "bin"
    fake_python(path / "python3", "3.11.7")
    (path / "python3.12").write_text("#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n")
    (path / "python3.12").chmod(0o755)
    result = run_with_path(project, path, tmp_path)
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1

    versions = tmp_path / ".pyenv" / "versions" / "3.12.9" / "bin"
    versions.mkdir(parents=True)
    (versions / "python3").symlink_to(sys.executable)
    actual = run_with_path(project, path, tmp_path, SNIP_VENV=str(tmp_path / "elsewhere"))
    assert actual.returncode == 0, actual.stderr
    assert (tmp_path / "elsewhere" / "snip-stamp.json").exists()
    assert not (project / ".venv").exists()


@pytest.mark.skipif(Path(sys.prefix, "snip-stack").exists(), reason="scripts/test.sh --stack has changed versions")
def test_everything_that_is_needed_is_pinned_at_the_installed_version() -> None:
    """The closure of snip_megatron[dev] over the installed distributions stands in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(re.fullmatch(r"([\w.-]+)==(\S+)", line).groups() for line in lines if not line.startswith("#"))  # type: ignore[union-attr]
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    needed: dict[str, str] = {}
    queue = [("snip_megatron", frozenset({"dev"}))]
    calls = set()
    while queue:
        name, extras = queue.pop()
        if (name, extras) in calls:
            continue
        calls.add((name, extras))
        distribution = metadata.distribution(name)
        needed[canonicalize_name(name)] = distribution.version
        for text in distribution.requires or []:
            requirement = Requirement(text)
            if any(requirement.marker is None or requirement.marker.evaluate({"extra": e}) for e in extras or {""}):
                queue.append((requirement.name, frozenset(requirement.extras)))
    needed.pop("snip-megatron")
    assert {name: pins.get(name) for name in needed} == needed
    assert set(pins) - set(needed) == {"pip"}, "pinned but no longer needed"

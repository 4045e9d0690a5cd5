"""`snip doctor` as a user and as a script calls it."""

import json
import os
import subprocess
from pathlib import Path

from snip_command import ROOT, snip_alone


def doctor(*arguments: str, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return snip_alone("doctor", *arguments, PYTHONPATH=f"{path}{os.pathsep}{ROOT}")


def test_json_and_exit_code_when_megatron_is_not_one_we_know(tmp_path):
    # A vendored Megatron in front of the installed one, of an untested version and without the names that SNIP uses.
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    for name in ("__init__.py", "package_info.py"):
        (core / name).write_text("__version__ = '0.31.0'\n", encoding="utf-8")
    process = doctor("--json", path=tmp_path)
    assert process.returncode == 1
    report = json.loads(process.stdout)
    assert report["schema"] == "snip.doctor/1"
    failed = [check for check in report["checks"] if check["status"] == "fail"]
    assert [check["name"] for check in failed] == ["megatron"]
    assert "0.31.0" in failed[0]["found"]


def test_packages_that_cannot_be_imported_fail_and_the_other_checks_are_made(tmp_path):
    names = {"torch", "megatron", "process group", "solver"}
    for package in ("torch", "ortools"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise OSError('libcudart.so: not found')", encoding="utf-8")
    process = doctor("--json", path=tmp_path)
    assert process.returncode == 1, process.stderr
    checks = {check["name"]: check for check in json.loads(process.stdout)["checks"]}
    assert {name for name, check in checks.items() if check["status"] == "fail"} == names
    assert all("OSError: libcudart.so: not found" in checks[name]["found"] for name in names)
    assert checks["disk"]["status"] != "fail"

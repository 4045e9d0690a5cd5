"""Diffs for Megatron's own repository: the test in each of them fails without it, and passes with it."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from installed import copy_installed, installed_megatron
from megatron.core.transformer import multi_token_prediction

PATCHES = sorted((Path(__file__).parents[3] / "patches" / "upstream").glob("*.patch"))
TESTS = {
    patch.stem: next(line.removeprefix("+++ b/") for line in patch.read_text().splitlines() if "+++ b/tests/" in line)
    for patch in PATCHES
}


@pytest.mark.skipif(
    not hasattr(multi_token_prediction, "is_inference_column_parallel_linear"), reason="the diffs are for Megatron 0.20"
)
@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="one fails without it alone")
def test_each_repairs_what_its_own_test_shows(tmp_path: Path) -> None:
    patched = copy_installed(tmp_path / "patched")
    for patch in PATCHES:
        command = ["git", "apply", "--unidiff-zero", str(patch)]
        # A repository above the folder would have git skip the files in silence.
        subprocess.run(command, cwd=patched, check=True, env=os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path)})
    assert set(outcomes(patched, tmp_path / "with").values()) == {True}
    assert set(outcomes(installed_megatron().parent, tmp_path / "without").values()) == {False}


def outcomes(megatron: Path, folder: Path) -> dict[str, bool]:
    """Run the diffs' tests on the Megatron in a folder. Returns name of the diff → whether all its tests pass."""
    shutil.copytree(folder.parent / "patched" / "tests", folder / "tests")  # pytest imports what stands beside them
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", "."]
    command += [f"--junitxml={report}", *TESTS.values()]
    environment = os.environ | {"PYTHONPATH": str(megatron), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=600, check=False)
    cases = list(ElementTree.parse(report).iter("testcase"))
    modules = {name: path.removesuffix(".py").replace("/", ".") for name, path in TESTS.items()}
    of_patch = {name: [case for case in cases if case.get("classname") == module] for name, module in modules.items()}
    assert all(of_patch.values())
    return {name: not any(len(case) for case in cases) for name, cases in of_patch.items()}

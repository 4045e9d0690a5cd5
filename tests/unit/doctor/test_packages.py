"""Version ranges, and what the doctor says of a package."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from snip_megatron.doctor import packages
from snip_megatron.doctor.check import Status
from snip_megatron.doctor.packages import EXTRAS, REQUIRED, Requirement, check_packages, release

SETUP = (Path(__file__).resolve().parents[3] / "setup.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2.11.0+cu130", (2, 11, 0)), ("0.19.0rc1", (0, 19, 0)), ("9.15.6755", (9, 15, 6755)), ("main", ()), ("2", (2,))],
)
def test_release_reads_the_leading_numbers(text, numbers):
    assert release(text) == numbers


@pytest.mark.parametrize(
    ("version", "admitted"), [((0, 16, 9), False), ((0, 17), True), ((0, 19, 4), True), ((0, 20), False), ((1,), False)]
)
def test_ranges_are_half_open(version, admitted):
    assert Requirement("megatron-core", (0, 17), (0, 20)).admits(version) is admitted


def test_the_ranges_are_those_of_the_package():
    declared = dict(re.findall(r'"([a-z0-9_-]+)(>=[^";]+)', SETUP))
    for requirement in (*REQUIRED, *(requirement for requirement, _, _ in EXTRAS)):
        assert declared[requirement.name] == requirement.range, requirement.name


def test_required_packages_are_found_here():
    found = {check.name: check for check in check_packages()}
    for requirement in REQUIRED:
        assert found[requirement.name].status is Status.OK
        assert found[requirement.name].found == importlib.metadata.version(requirement.name)


def test_a_missing_and_an_old_package_say_what_to_install(monkeypatch):
    versions = {"megatron-core": "0.16.1", "wandb": "0.10"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(packages.importlib.metadata, "version", version)
    found = {check.name: check for check in check_packages()}
    assert found["megatron-core"].status is Status.FAIL
    assert "pip install 'megatron-core>=0.19,<0.20'" in found["megatron-core"].advice
    assert (found["torch"].status, found["torch"].found) == (Status.FAIL, "not installed")
    assert (found["wandb"].status, found["apex"].status) == (Status.NOTE, Status.NOTE)

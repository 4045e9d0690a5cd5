"""Version ranges, and what the doctor says of a package."""

import importlib.metadata

import pytest
from packaging.requirements import Requirement

from snip_megatron.tools.checks import packages
from snip_megatron.tools.checks.check import Status
from snip_megatron.tools.checks.packages import check_packages


@pytest.mark.parametrize(
    ("version", "admitted"),
    [("0.16.9", False), ("0.17.0rc1", True), ("0.19.4+cu130", True), ("0.20.0.dev1", False), ("main", False)],
)
def test_release_candidates_and_builds_count_as_their_release(version, admitted):
    assert packages.admits(Requirement("megatron-core>=0.17,<0.20"), version) is admitted
    assert packages.admits(Requirement("apex"), version)


def test_a_missing_and_an_old_package_say_what_to_install(monkeypatch):
    versions = {"megatron-core": "0.16.1", "wandb": "0.10"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {check.name: check for check in check_packages()}
    assert found["megatron-core"].status is Status.FAIL
    assert "pip install 'megatron-core<0.20,>=0.19'" in found["megatron-core"].advice
    assert (found["torch"].status, found["torch"].found) == (Status.FAIL, "not installed")
    assert (found["wandb"].status, found["apex"].status) == (Status.NOTE, Status.NOTE)

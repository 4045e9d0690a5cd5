"""What the doctor says of ports and directories on this host, and of packages and their versions."""

import importlib.metadata
import os
import socket
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from snip_megatron.doctor import host, packages
from snip_megatron.doctor.check import Status
from snip_megatron.doctor.packages import check_packages


def test_a_taken_port_is_noticed():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check = host._port(port)
    assert (check.status, check.found) == (Status.NOTE, f"{port} is taken")
    assert host._port(port).status is Status.OK


def test_disk_looks_at_the_nearest_existing_folder(tmp_path):
    assert str(tmp_path) in host._disk(tmp_path / "not" / "there").found


@pytest.mark.parametrize("where", ["/proc/snip/run", "{file}", "{file}/run", "{folder}/" + 300 * "x"])
def test_a_folder_that_cannot_be_made_fails(tmp_path, where):
    file = tmp_path / "file"
    file.touch()
    check = host._disk(Path(where.format(file=file, folder=tmp_path)))
    assert check.status is Status.FAIL
    assert "no folder can be made" in check.found


def test_looking_at_a_folder_leaves_nothing_there(tmp_path):
    assert host._disk(tmp_path / "runs" / "one").status is Status.OK
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_folder_fails(tmp_path):
    tmp_path.chmod(0o500)
    assert host._disk(tmp_path).status is Status.FAIL


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

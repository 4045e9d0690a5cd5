"""Directories on this host."""

import os
from pathlib import Path

import pytest

from snip_megatron.tools.checks import host
from snip_megatron.tools.checks.check import Status


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

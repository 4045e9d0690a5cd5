"""Where the Multi-Process Service cannot be had, a comparison is told so and goes on without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from snip_megatron.evaluation import mps


@pytest.fixture(autouse=True)
def only_this_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/bin")
    monkeypatch.setattr(mps, "PLACES", ())
    return folder


def test_not_installed(tmp_path: Path) -> None:
    with mps.multi_process_service(tmp_path / "pipes") as (variables, told):
        assert variables == {}
        assert told == "no nvidia-cuda-mps-control on this machine: processes take turns on a GPU"


def test_a_daemon_that_does_not_start(tmp_path: Path, only_this_path: Path) -> None:
    program = only_this_path / mps.CONTROL
    program.write_text("#!/bin/sh\necho cannot start here >&2\nexit 1\n")
    program.chmod(0o755)
    with mps.multi_process_service(tmp_path / "pipes") as (variables, told):
        assert variables == {}
        assert "cannot start here" in told


def test_a_daemon_whose_clients_cannot_compute_is_ended(tmp_path: Path, only_this_path: Path) -> None:
    """No GPU here: the first client fails."""
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    program = only_this_path / mps.CONTROL
    program.write_text(f'#!/bin/sh\n[ "$1" = -d ] || cat > {tmp_path}/told\n')
    program.chmod(0o755)
    with mps.multi_process_service(tmp_path / "pipes") as (variables, told):
        assert variables == {}
        assert told.startswith("no Multi-Process Service (")
    assert (tmp_path / "told").read_text() == "quit\n"
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ

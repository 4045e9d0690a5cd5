"""Where a run writes its record."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from snip_megatron.config import SnipConfig
from snip_megatron.errors import SnipError
from snip_megatron.megatron.run_record import open_run_directory
from snip_megatron.records.run_directory import RunDirectory
from snip_megatron.sensitivity.request import SolveRequest


def test_a_replay_is_not_written_over_what_it_replays(tmp_path: Path) -> None:
    """With --snip-overwrite, the record would be removed before it is read."""
    with RunDirectory(tmp_path / "snip", {}, overwrite=False, resume_step=None) as run:
        run.event(4, "adopt", version=1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    config = SnipConfig(enabled=True, replay=str(tmp_path / "snip"), overwrite=True)
    with pytest.raises(SnipError, match="would write its record over the one it replays; choose another --snip-dir"):
        open_run_directory(config, Namespace(save=str(tmp_path)), 0, SolveRequest(), (), "reference")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

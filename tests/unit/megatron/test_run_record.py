"""Where a run writes its record."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from llama_arguments import linears, run_arguments

from snip_megatron.megatron.run_record import _predicted_times, open_run_directory
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.run_directory import RunDirectory
from snip_megatron.sensitivity.request import SolveRequest


def test_a_replay_is_not_written_over_what_it_replays(tmp_path: Path) -> None:
    """With --snip-overwrite, the record would be removed before it is read."""
    with RunDirectory(tmp_path / "snip", {}, overwrite=False, resume_step=None) as run:
        run.event(4, "adopt", version=1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    config = SnipConfig(enabled=True, replay=str(tmp_path / "snip"), overwrite=True)
    with pytest.raises(SnipError, match="would write its record over the one it replays; choose another --snip-dir"):
        open_run_directory(config, Namespace(save=str(tmp_path)), 0, SolveRequest(), (), "reference", ())
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("device", "formats", "said"),
    [
        ("NVIDIA H200", ("fp8", "fp4"), ""),
        ("Some other GPU", ("fp8", "fp4"), ""),
        (
            "NVIDIA H200",
            ("fp8", "nvfp4"),
            "no predicted times: measured times with --snip-budget fp4=0.75: the timings",
        ),
    ],
)
def test_predicted_times_that_are_not_known_are_named(
    device: str,
    formats: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A GPU without a table has none, and nothing is to be said. Any other reason is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    args = run_arguments()
    times = _predicted_times(SnipConfig(enabled=True, formats=formats), args, linears(args).covered, "hopper")
    assert (times is not None) is (device == "NVIDIA H200" and not said)
    out = capsys.readouterr().out
    assert said in out if said else not out

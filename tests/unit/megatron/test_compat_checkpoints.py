"""Which checkpoint is loaded where the latest was not written to its end; in which SNIP's state is looked for."""

import argparse
import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from snip_megatron.megatron import compat
from snip_megatron.megatron.compat import checkpoint_fallback as fallback
from snip_megatron.precision.errors import SnipError

TRACKER = "latest_checkpointed_iteration.txt"


def write(folder: Path, iteration: int, *keys: str) -> None:
    """A checkpoint in torch's distributed format as Megatron completes it, and the tracker that names it."""
    path = folder / f"iter_{iteration:07d}"
    state = dict.fromkeys(("weight", *keys), torch.arange(64.0))
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder / TRACKER).write_text(str(iteration))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Checkpoints of iterations 4, 8 and 12."""
    for iteration in (4, 8, 12):
        write(tmp_path, iteration)
    return tmp_path


def read(folder: Path) -> tuple[int, bool]:
    return fallback.read_tracker(str(folder / TRACKER))


def part(folder: Path) -> Path:
    return next(folder.glob("*.distcp"))


def test_whole_checkpoints_are_left_alone(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert read(saved) == (12, False)
    (saved / TRACKER).write_text("4\n")  # as a user sets it to go back
    assert read(saved) == (4, False)
    (saved / TRACKER).write_text("release")
    assert read(saved) == (0, True)
    assert capsys.readouterr().out == ""


DAMAGE: dict[str, Callable[[Path], object]] = {
    "its folder is missing": lambda path: path.rename(path.with_name("elsewhere")),
    "metadata.json is missing": lambda path: (path / "metadata.json").unlink(),
    ".metadata is missing": lambda path: (path / ".metadata").unlink(),
    ".metadata cannot be read": lambda path: os.truncate(path / ".metadata", 40),
    "__0_0.distcp is missing": lambda path: part(path).unlink(),
    "__0_0.distcp has 100 bytes of": lambda path: os.truncate(part(path), 100),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_a_damaged_latest_gives_way_to_the_one_before(
    saved: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGE[fault](saved / "iter_0000012")
    assert read(saved) == (8, False)
    said = capsys.readouterr().out
    assert f"iteration 12 is incomplete ({fault}" in said
    assert "loading iteration 8" in said
    (saved / "iter_0000008" / "metadata.json").unlink()
    assert read(saved) == (4, False)


@pytest.mark.parametrize("text", ["", "garbage", "\x00\x00", "-3", "1e9", "9" * 40])
def test_an_unreadable_tracker_means_the_newest_whole_one(saved: Path, text: str) -> None:
    (saved / TRACKER).write_text(text)
    assert read(saved) == (12, False)
    (saved / "iter_0000012" / "metadata.json").unlink()
    assert read(saved) == (8, False)


def test_nothing_newer_than_what_the_user_named_is_taken(saved: Path) -> None:
    (saved / TRACKER).write_text("8")
    (saved / "iter_0000008" / ".metadata").unlink()
    assert read(saved) == (4, False)


def test_none_left_is_one_line(saved: Path) -> None:
    (saved / TRACKER).write_text("4")
    (saved / "iter_0000004" / ".metadata").unlink()
    with pytest.raises(SnipError, match=r"neither the checkpoint it names nor one before it is complete.*--ckpt-step"):
        read(saved)


def test_other_formats_are_not_judged(saved: Path) -> None:
    legacy = saved / "iter_0000016" / "mp_rank_00"
    legacy.mkdir(parents=True)
    (legacy / "model_optim_rng.pt").touch()
    (saved / TRACKER).write_text("16")
    assert read(saved) == (16, False)


# -- SNIP's state ----------------------------------------------------------------------------------------------------
def holds(load: Path, own_folder: Path | None = None, **fields: object) -> bool:
    folder = None if own_folder is None else str(own_folder)
    args = argparse.Namespace(load=str(load), ckpt_step=None, non_persistent_global_ckpt_dir=folder, **fields)
    return compat.checkpoint_holds(args, "snip.state")


def test_the_tracker_names_it(tmp_path: Path) -> None:
    assert not holds(tmp_path)
    write(tmp_path, 4, "snip.state")
    assert holds(tmp_path)
    write(tmp_path, 8)
    assert not holds(tmp_path)


@pytest.mark.parametrize("own_folder", [None, "elsewhere"])
def test_a_newer_non_persistent_one_is_loaded_instead(tmp_path: Path, own_folder: str | None) -> None:
    load, folder = tmp_path / "saved", None if own_folder is None else tmp_path / own_folder
    found = functools.partial(holds, load, folder, non_persistent_ckpt_type="global")
    assert not found()
    write(folder or load / "non_persistent", 8, "snip.state")
    assert found()  # without a persistent one
    write(load, 4)
    assert found()
    write(load, 12)
    assert not found()

"""In which checkpoint SNIP's state is looked for."""

import argparse
import functools
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from snip_megatron.megatron import compat

TRACKER = "latest_checkpointed_iteration.txt"


def write(folder: Path, iteration: int, *keys: str) -> None:
    """A checkpoint in torch's distributed format as Megatron completes it, and the tracker that names it."""
    path = folder / f"iter_{iteration:07d}"
    state = dict.fromkeys(("weight", *keys), torch.arange(64.0))
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder / TRACKER).write_text(str(iteration))


def holds(load: Path, own_folder: Path | None = None, **fields: object) -> bool:
    folder = None if own_folder is None else str(own_folder)
    args = argparse.Namespace(load=str(load), ckpt_step=None, non_persistent_global_ckpt_dir=folder, **fields)
    return compat.checkpoint_has(args, "snip.state")


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

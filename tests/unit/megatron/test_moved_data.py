"""Signs that a blamed job reads other samples than the one that saved its checkpoint."""

import os
from pathlib import Path

import torch
from llama_arguments import arguments

from snip_megatron.megatron.blame import moved_data


def test_other_arguments_and_newer_files_are_named(tmp_path: Path) -> None:
    saved_in = tmp_path / "checkpoints" / "iter_0000050"
    saved_in.mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("50")
    data = tmp_path / "mine.bin"
    data.write_bytes(b"tokens")
    job = arguments(load=str(tmp_path / "checkpoints"), data_path=[str(tmp_path / "mine")])
    assert list(moved_data(job)) == []  # there is nothing to compare with
    torch.save({"args": job}, saved_in / "common.pt")
    os.utime(data, (1, 1))
    assert list(moved_data(job)) == []
    data.touch()
    os.utime(saved_in / "common.pt", (1, 1))
    (line,) = moved_data(job)
    assert line.startswith(f"data that moved: {data} was written after the checkpoint")
    os.utime(data, (1, 1))
    other = arguments(load=job.load, data_path=[str(tmp_path / "other")], seed=job.seed + 1)
    path, seed = moved_data(other)
    assert f"--data-path was {job.data_path} when the checkpoint was saved" in path
    assert seed.startswith("data that moved: --seed was ")

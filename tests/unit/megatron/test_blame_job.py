"""What a blamed job says about its weights and data before any pass."""

import os
from pathlib import Path

import torch
from llama_arguments import arguments

from snip_megatron.megatron.blame import broken_weights, moved_data, weights_digest


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


def test_weights_have_a_digest_of_their_bits_and_are_finite() -> None:
    model = [torch.nn.Linear(8, 4).bfloat16(), torch.nn.Linear(4, 4)]
    before = weights_digest(model)
    assert (weights_digest(model), broken_weights(model)) == (before, None)
    with torch.no_grad():
        model[0].weight[0, 0], model[0].weight[0, 1] = model[0].weight[0, 1].clone(), model[0].weight[0, 0].clone()
    assert weights_digest(model) != before
    with torch.no_grad():
        model[1].bias[2] = torch.nan
    assert broken_weights(model) == "bias"

"""In which checkpoint SNIP's state is looked for; which optimizer states Megatron finds in a sharded model."""

import argparse
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from snip_megatron.megatron import compat
from snip_megatron.megatron.compat import distributed_optimizer

TRACKER = "latest_checkpointed_iteration.txt"


def write(folder: Path, iteration: int, *keys: str) -> None:
    """A checkpoint in torch's distributed format as Megatron completes it, and the tracker that names it."""
    path = folder / f"iter_{iteration:07d}"
    state = dict.fromkeys(("weight", *keys), torch.arange(64.0))
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder / TRACKER).write_text(str(iteration))


def holds(load: Path, place: Path | None = None, **fields: object) -> bool:
    folder = None if place is None else str(place)
    args = argparse.Namespace(load=str(load), ckpt_step=None, non_persistent_global_ckpt_dir=folder, **fields)
    return compat.checkpoint_has(args, "snip.state")


def test_the_tracker_names_it(tmp_path: Path) -> None:
    assert not holds(tmp_path)
    write(tmp_path, 4, "snip.state")
    assert holds(tmp_path)
    write(tmp_path, 8)
    assert not holds(tmp_path)


@pytest.mark.parametrize("place", [None, "elsewhere"])
def test_a_newer_non_persistent_one_is_loaded_instead(tmp_path: Path, place: str | None) -> None:
    load, folder = tmp_path / "saved", None if place is None else tmp_path / place
    result = functools.partial(holds, load, folder, non_persistent_ckpt_type="global")
    assert not result()
    write(folder or load / "non_persistent", 8, "snip.state")
    assert result()  # without a persistent one
    write(load, 4)
    assert result()
    write(load, 12)
    assert not result()


def test_states_of_a_model_under_torch_s_full_sharding(one_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the repair Megatron finds them only where ``to_local`` returns one tensor, not in torch 2.15."""
    model: Any = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=DeviceMesh.from_group(one_rank, "cpu"))
    shards: dict[str, Any] = {
        name: ShardedTensor.from_rank_offsets(name, parameter._local_tensor)
        for name, parameter in model.named_parameters()
    }
    states = distributed_optimizer.optimizer_states

    def finds_all() -> bool:
        return sorted(states.get_param_id_to_sharded_param_map(shards, model.parameters())) == [0, 1]

    stateful = distributed_optimizer.Float16OptimizerWithFloat16Params
    for owner, name in (
        (states, "to_local_if_dtensor"),
        (distributed_optimizer.checkpointing, "_load_base_checkpoint"),
        (stateful, "sharded_state_dict"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restores what the repair replaces
    with torch.no_grad():
        same_tensor = model.weight.to_local() is model.weight.to_local()
    assert finds_all() == same_tensor
    distributed_optimizer.install_for_torch_fsdp()
    assert finds_all()

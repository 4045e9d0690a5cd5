"""Reading Megatron's torch_dist checkpoints without Megatron: every tensor, every object, by its global name."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

SNIP_KEY = "snip."  # our own object, which a run without SNIP has not


def read_checkpoint(folder: Path, step: int) -> dict[str, Any]:
    """Name -> tensor (whole, unsharded) or object; without the command line that Megatron keeps as well."""
    path = folder / f"iter_{step:07d}"
    reader = dcp.FileSystemReader(path)
    state: dict[str, Any] = {}
    for name, meta in reader.read_metadata().state_dict_metadata.items():
        is_tensor = isinstance(meta, TensorStorageMetadata)
        state[name] = torch.empty(meta.size, dtype=meta.properties.dtype) if is_tensor else None
    dcp.load(state, storage_reader=reader, no_dist=True)
    for name, value in state.items():
        if name.startswith("common_state"):
            for part in value:
                del part["args"]  # the command line
    return state


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names whose bits differ, or that only one holds; ours aside."""
    names = {name for name in one.keys() | other.keys() if not name.startswith(SNIP_KEY)}
    return sorted(name for name in names if name not in one or name not in other or not same(one[name], other[name]))


def same(one: Any, other: Any) -> bool:
    """Bitwise equality of nested objects and tensors."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "dtype"):  # NumPy's
        return bool((one == other).all())
    return bool(one == other)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes, so that NaN equals itself and −0 is not 0."""
    return tensor.contiguous().view(-1).view(torch.uint8)

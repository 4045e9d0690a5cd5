"""Reading Megatron's torch_dist checkpoints without Megatron: every tensor, every object, by its global name."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

SNIP_KEY = "snip."  # SNIP's own object, which a run without SNIP does not have


def read_checkpoint(folder: Path, step: int) -> dict[str, Any]:
    """Return name -> whole tensor or object, without the command line that Megatron stores too."""
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


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return the names whose bits differ or that only one state has. SNIP's own entries are not compared."""
    names = {name for name in a.keys() | b.keys() if not name.startswith(SNIP_KEY)}
    return sorted(name for name in names if name not in a or name not in b or not same(a[name], b[name]))


def same(a: Any, b: Any) -> bool:
    """Bitwise equality of nested objects and tensors."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "dtype"):  # NumPy's
        return bool((a == b).all())
    return bool(a == b)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as bytes, so that NaN equals itself and −0 is not 0."""
    return tensor.contiguous().view(-1).view(torch.uint8)

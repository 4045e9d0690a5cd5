"""``python -m snip_megatron.evaluation.weights_hash CHECKPOINT`` prints the hash of a distributed checkpoint's weights.

It runs in a separate process, because reading a checkpoint imports torch and the Megatron classes in its metadata.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

OPTIMIZER = "optimizer."


def weights_sha256(checkpoint: Path) -> str:
    """Return the SHA-256 over name, dtype, shape and bytes of all tensors except optimizer state, sorted by name.

    Args:
        checkpoint: an ``iter_<N>`` folder in Megatron's torch_dist format.

    Raises:
        ValueError: the folder holds no weights.
    """
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint

    reader = FileSystemReader(checkpoint)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in sorted(entries.items())
        if isinstance(entry, TensorStorageMetadata) and not name.startswith(OPTIMIZER)
    }
    if not tensors:
        raise ValueError(f"{checkpoint}: no weights")
    load_checkpoint(tensors, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


if __name__ == "__main__":
    print(weights_sha256(Path(sys.argv[1])))

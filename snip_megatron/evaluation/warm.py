"""The warm checkpoint, which a bf16 training through the entry makes.

Its folder is named by the hash of the arguments and the text that make it. Its results are identified by the hash of
its weights.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from snip_megatron.errors import SnipError, cut
from snip_megatron.evaluation.data import Data
from snip_megatron.evaluation.experiment import Experiment, Warm
from snip_megatron.evaluation.runner import Job
from snip_megatron.evaluation.runs import fill, training_command, warm_arguments, warm_identity
from snip_megatron.records.storage import dump_json, write_atomically

HASHES = "weights.json"
_OPTIMIZER = "optimizer."


@dataclass(frozen=True)
class WarmCheckpoint:
    """The warm checkpoint of an experiment, which need not exist yet. ``folder`` is the argument of ``--load``."""

    experiment: Experiment
    data: Data
    warm: Warm
    folder: Path

    @property
    def sha256(self) -> str | None:
        """Hash of all weights after ``warm.steps`` steps; None if the checkpoint does not exist or is incomplete."""
        if not self._weights.is_dir():
            return None
        try:
            value = json.loads((self.folder / HASHES).read_text(encoding="utf-8"))[str(self.warm.steps)]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
        return value if isinstance(value, str) else None

    @property
    def arguments(self) -> list[str]:
        """The recorded arguments of the run that makes the checkpoint."""
        return warm_arguments(self.experiment, self.data, self.warm)

    def job(self, logs: Path) -> Job:
        """Return the job that makes the checkpoint. After its success :attr:`sha256` is not None."""
        filled = fill(self.arguments, {"data": str(self.data.folder), "warm": str(self.folder)})
        return Job(
            name=f"warm checkpoint {self.folder.name}",
            command=training_command(
                [*filled, "--data-cache-path", str(self.folder / "cache")], self.experiment.training.ranks
            ),
            log=logs / f"warm_{self.folder.name}.txt",
            before=lambda: shutil.rmtree(self.folder, ignore_errors=True),
            check=self._write_hash,
        )

    @property
    def _weights(self) -> Path:
        return self.folder / f"iter_{self.warm.steps:07d}"

    def _write_hash(self) -> None:
        try:
            found = weights_sha256(self._weights)
        except Exception as error:  # whatever reading a broken checkpoint raises
            raise ValueError(f"{self._weights}: cannot be hashed ({cut(error)})") from None
        write_atomically(self.folder / HASHES, dump_json({str(self.warm.steps): found}).encode())


def warm_checkpoint(experiment: Experiment, data: Data, work: Path) -> WarmCheckpoint:
    """Return the warm checkpoint of ``experiment`` in the folder ``work``. Raises SnipError if it has none."""
    if experiment.warm is None:
        raise SnipError(f"experiment {experiment.name}: has no warm checkpoint")
    name = warm_identity(experiment, data, experiment.warm)
    return WarmCheckpoint(experiment, data, experiment.warm, work / "warm" / name)


def weights_sha256(checkpoint: Path) -> str:
    """Return the SHA-256 over name, dtype, shape and bytes of all tensors except optimizer state, sorted by name.

    ``checkpoint`` is an ``iter_<N>`` folder of Megatron's torch_dist format. Raises ValueError if it holds no weights.
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
        if isinstance(entry, TensorStorageMetadata) and not name.startswith(_OPTIMIZER)
    }
    if not tensors:
        raise ValueError(f"{checkpoint}: no weights")
    load_checkpoint(tensors, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()

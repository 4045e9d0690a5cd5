"""The warm checkpoint, which a bf16 training through the entry makes.

Its folder is named by the hash of the arguments and the text that make it. Its results are identified by the hash of
its weights.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from snip_megatron.errors import SnipError
from snip_megatron.evaluation.data import Data
from snip_megatron.evaluation.experiment import Experiment, Warm
from snip_megatron.evaluation.runner import Job
from snip_megatron.evaluation.runs import fill, training_command, warm_arguments, warm_identity
from snip_megatron.records.storage import dump_json, write_atomically

HASHES = "weights.json"
HASH_TIMEOUT_S = 300


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
        command = [sys.executable, "-m", "snip_megatron.evaluation.weights_hash", str(self._weights)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=HASH_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise ValueError(f"{self._weights}: cannot be hashed (it took more than {HASH_TIMEOUT_S} s)") from None
        lines = [line for line in (done.stdout if done.returncode == 0 else done.stderr).splitlines() if line.strip()]
        if done.returncode != 0 or not lines:
            raise ValueError(f"{self._weights}: cannot be hashed ({lines[-1] if lines else 'no output'})")
        write_atomically(self.folder / HASHES, dump_json({str(self.warm.steps): lines[-1].strip()}).encode())


def warm_checkpoint(experiment: Experiment, data: Data, work: Path) -> WarmCheckpoint:
    """Return the warm checkpoint of ``experiment`` in the folder ``work``. Raises SnipError if it has none."""
    if experiment.warm is None:
        raise SnipError(f"experiment {experiment.name}: has no warm checkpoint")
    name = warm_identity(experiment, data, experiment.warm)
    return WarmCheckpoint(experiment, data, experiment.warm, work / "warm" / name)

"""The warm checkpoint: bf16 training through the entry, kept by what makes it, known by the hash of its weights."""

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
from snip_megatron.evaluation.runs import MODULE, fill, warm_arguments, warm_identity
from snip_megatron.reporting.storage import dump_json, write_atomically

HASHES = "weights.json"
HASH_TIMEOUT_S = 300


@dataclass(frozen=True)
class WarmCheckpoint:
    """Where the checkpoint of an experiment is, or will be. ``folder`` is what ``--load`` takes."""

    experiment: Experiment
    data: Data
    warm: Warm
    folder: Path

    @property
    def sha256(self) -> str | None:
        """Hash of all weights after ``warm.steps`` steps; None while there is no whole checkpoint."""
        try:
            value = json.loads((self.folder / HASHES).read_text(encoding="utf-8"))[str(self.warm.steps)]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
        return value if isinstance(value, str) else None

    @property
    def arguments(self) -> list[str]:
        """Recorded arguments of the run that makes it."""
        return warm_arguments(self.experiment, self.data, self.warm)

    def job(self, logs: Path) -> Job:
        """The process that makes it; ended well, :attr:`sha256` is there."""
        filled = fill(self.arguments, {"data": str(self.data.folder), "warm": str(self.folder)})
        return Job(
            name=f"warm checkpoint {self.folder.name}",
            command=[sys.executable, "-m", MODULE, *filled, "--data-cache-path", str(self.folder / "cache")],
            log=logs / f"warm_{self.folder.name}.txt",
            before=lambda: shutil.rmtree(self.folder, ignore_errors=True),
            check=self._write_hash,
        )

    def _write_hash(self) -> None:
        hashes = {str(self.warm.steps): self._hash(self.warm.steps)}
        write_atomically(self.folder / HASHES, dump_json(hashes).encode())

    def _hash(self, step: int) -> str:
        command = [sys.executable, "-m", "snip_megatron.evaluation.weights_hash", str(self.iteration(step))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HASH_TIMEOUT_S, check=False)
        lines = [line for line in (done.stdout if done.returncode == 0 else done.stderr).splitlines() if line.strip()]
        if done.returncode != 0 or not lines:
            raise ValueError(f"{self.iteration(step)}: cannot be hashed ({lines[-1] if lines else 'no output'})")
        return lines[-1].strip()

    def iteration(self, step: int) -> Path:
        """Folder of the checkpoint after ``step`` steps."""
        return self.folder / f"iter_{step:07d}"


def warm_checkpoint(experiment: Experiment, data: Data, work: Path) -> WarmCheckpoint:
    """Where in ``work`` the warm checkpoint of ``experiment`` belongs. Raises SnipError if it has none."""
    if experiment.warm is None:
        raise SnipError(f"experiment {experiment.name}: has no warm checkpoint")
    name = warm_identity(experiment, data, experiment.warm)
    return WarmCheckpoint(experiment, data, experiment.warm, work / "warm" / name)

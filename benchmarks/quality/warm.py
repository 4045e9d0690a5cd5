"""The warm checkpoint, which a bf16 training through the entry makes, and sensitivities that are measured there.

Its folder is named by the hash of the arguments and the text that make it. Its results are identified by the hash of
its weights.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.quality.experiment import Experiment, Warm
from benchmarks.quality.models import Data
from benchmarks.quality.runner import Job, Outcome, Pool
from benchmarks.quality.runs import fill, training_arguments, training_command, warm_arguments, warm_identity
from snip_megatron.precision.errors import SnipError, cut
from snip_megatron.runtime.storage import dump_json, write_atomically

HASHES = "weights.json"
MEASURED = "benchmarks.quality.measured_pretrain"
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
        """Hash of all weights after ``warm.steps`` steps. None if the checkpoint does not exist or is incomplete."""
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
            sha = weights_sha256(self._weights)
        except Exception as error:  # whatever reading a broken checkpoint raises
            raise ValueError(f"{self._weights}: cannot be hashed ({cut(error)})") from None
        write_atomically(self.folder / HASHES, dump_json({str(self.warm.steps): sha}).encode())


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


# -- sensitivities -----------------------------------------------------------------------------------------------
def record_truth(
    experiment: Experiment, data: Data, work: Path, fmt: str, microbatches: int, pool: Pool
) -> list[tuple[int, Path]]:
    """Measure at all checkpoints of the warm run, which is trained if they do not exist.

    Each option alone is forced to ``fmt``, on two disjoint batches of so many microbatches. ``work`` is the folder for
    checkpoints and run directories. Returns (step, run directory) of each checkpoint. Raises SnipError if a process
    fails twice, or the time is over.
    """
    warm = warm_checkpoint(experiment, data, work)
    if warm.sha256 is None:
        _run(pool, [warm.job(work / "logs")])
    folders = [(step, work / "proxy" / f"{warm.folder.name}_{step}") for step in (*warm.warm.save, warm.warm.steps)]
    _run(pool, [_job(warm, step, folder, fmt, microbatches, work / "logs") for step, folder in folders])
    return folders


def _run(pool: Pool, jobs: Sequence[Job]) -> None:
    failed: list[Outcome] = []

    def ended(outcome: Outcome) -> None:
        print(f"validate_proxy: {outcome.job.name}: {outcome.seconds:.0f} s", file=sys.stderr, flush=True)
        if outcome.error is not None:
            failed.append(outcome)

    pool.add(jobs)
    unfinished = pool.run(ended)
    if failed:
        raise SnipError(f"{failed[0].job.name} failed: {failed[0].error} (log: {failed[0].job.log})", exit_code=1)
    if unfinished:
        raise SnipError(f"{unfinished} recordings did not end in time; raise --time-limit", exit_code=1)


def _job(warm: WarmCheckpoint, step: int, folder: Path, fmt: str, microbatches: int, logs: Path) -> Job:
    """Return the job of two steps after a checkpoint: the first gives the gradient norm, the second measures."""
    arguments = [
        *training_arguments(warm.experiment, warm.data, warm.warm.seed),
        *("--eval-interval", "1000000000", "--eval-iters", "0", "--exit-interval", str(step + 2)),
        *("--load", "{warm}", "--ckpt-step", str(step), "--ckpt-format", "torch_dist"),
        *("--snip", "--snip-estimator", "noise", "--snip-probe-microbatches", str(microbatches)),
        # Any format, with four bits or not, meets this budget.
        *("--snip-formats", fmt, "--snip-budget", "fp4=0", "--snip-first-update", str(step + 1)),
        *("--snip-update-interval", "1000000", "--snip-lag", "1", "--snip-wait", "600", "--snip-dir", "{run}"),
        *("--data-cache-path", "{run}/cache"),
    ]
    folders = {"data": str(warm.data.folder), "warm": str(warm.folder), "run": str(folder)}

    def check() -> None:
        if not (folder / "truth" / f"step_{step + 1}.npz").is_file():
            raise ValueError("nothing was measured")

    return Job(
        name=f"truth after {step} steps",
        command=training_command(fill(arguments, folders), warm.experiment.training.ranks, module=MEASURED),
        log=logs / f"{folder.name}.txt",
        before=lambda: shutil.rmtree(folder, ignore_errors=True),
        check=check,
    )

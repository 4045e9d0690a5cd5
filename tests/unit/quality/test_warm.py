"""The warm checkpoint: when it is there, and when it has to be trained."""

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.quality.experiment import load_experiment
from benchmarks.quality.models import Data
from benchmarks.quality.runner import Job, Pool
from benchmarks.quality.warm import HASHES, record_truth, warm_checkpoint
from snip_megatron.runtime.config import parse_snip_arguments, resolve_arguments

NANO = Path(__file__).resolve().parents[3] / "benchmarks/quality/experiments" / "nano.json"


def test_a_warm_checkpoint_whose_weights_were_removed_is_trained_again(tmp_path: Path) -> None:
    warm = warm_checkpoint(load_experiment(NANO), Data(tmp_path, "bytes", "0" * 64, 1000, 100), tmp_path)
    assert warm.sha256 is None
    weights = warm.folder / "iter_0000008"
    weights.mkdir(parents=True)
    (warm.folder / HASHES).write_text(json.dumps({"8": "abc"}))
    assert warm.sha256 == "abc"
    weights.rmdir()
    assert warm.sha256 is None


def test_a_measurement_waits_for_its_kernels(tmp_path: Path) -> None:
    """It has one step for its update: on a GPU without compiled kernels nothing was measured."""

    class Kept(Pool):
        def add(self, jobs: Sequence[Job]) -> None:
            commands.extend(job.command for job in jobs)

    commands: list[Sequence[str]] = []
    experiment, data = load_experiment(NANO), Data(tmp_path, "bytes", "0" * 64, 1000, 100)
    warm = warm_checkpoint(experiment, data, tmp_path)
    (warm.folder / "iter_0000008").mkdir(parents=True)
    (warm.folder / HASHES).write_text(json.dumps({"8": "abc"}))
    record_truth(experiment, data, tmp_path, "nvfp4", 1, Kept([None], {}))
    assert [resolve_arguments(parse_snip_arguments(list(command))).wait > 60 for command in commands] == [True, True]

"""The warm checkpoint: when it is there, and when it has to be trained."""

import json
from pathlib import Path

from snip_megatron.evaluation.experiment import load_experiment
from snip_megatron.evaluation.models import Data
from snip_megatron.evaluation.warm import HASHES, warm_checkpoint

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

"""Experiment files: the committed ones parse, faults are named by place, runs are what the file says."""

import json
from pathlib import Path
from typing import Any

import pytest
from damage import changed

from benchmarks.quality.experiment import Experiment, load_experiment, parse_experiment
from benchmarks.quality.models import Data
from benchmarks.quality.runs import experiment_runs, training_command
from snip_megatron.pretrain_gpt import parse_snip_arguments
from snip_megatron.runtime.config import SnipConfig, resolve_arguments
from snip_megatron.sensitivity.policies import LATE

FILES = sorted((Path(__file__).resolve().parents[3] / "benchmarks/quality/experiments").glob("*.json"))
NANO = next(json.loads(path.read_text()) for path in FILES if path.stem == "nano")


def data(folder: str = "/data") -> Data:
    return Data(Path(folder), "bytes", "d" * 64, 10**8, 10**6)


def parse(body: Any) -> Experiment:
    return parse_experiment(body, "e.json", "e")


def snip_config(arguments: tuple[str, ...]) -> SnipConfig:
    return resolve_arguments(parse_snip_arguments(list(arguments)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_committed_experiments_give_runs_that_the_entry_accepts(path: Path) -> None:
    experiment = load_experiment(path)
    runs = experiment_runs(experiment, data())
    assert len({run.identity(data(), "w") for run in runs}) == len(runs)
    for run in runs:
        config = snip_config(run.arguments)
        assert (config.policy, config.seed, config.eval) == (run.policy, run.seed, "both")
        assert config.updates == (run.budget is not None and run.policy not in LATE)
        if run.budget is not None:
            assert config.budget.value == run.budget or any('"budget"' in text for text in run.arguments)
            assert config.granularity == run.granularity
        if config.updates:
            assert config.is_update_step(config.first_update)


def test_runs_from_a_warm_checkpoint_save_what_they_load() -> None:
    """Megatron ends in a KeyError if it loads an optimizer under --no-save-optim."""
    runs = experiment_runs(parse(json.loads(changed(NANO, "from_warm.save", True))), data())
    assert any("--no-save-optim" in run.arguments for run in runs)
    for run in runs:
        command = training_command(run.arguments, 1)
        assert not ("--load" in command and {"--no-save-optim", "--no-save-rng"} & set(command))

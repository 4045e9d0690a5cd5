"""Experiment files: the committed ones parse, faults are named by place, runs are what the file says."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from refusal import refusal

from benchmarks.quality.experiment import Experiment, load_experiment, parse_experiment
from benchmarks.quality.models import Data
from benchmarks.quality.runs import experiment_runs, fill, training_command
from snip_megatron.pretrain_gpt import parse_snip_arguments
from snip_megatron.runtime.config import SnipConfig, resolve_arguments
from snip_megatron.sensitivity.policies import LATE

FILES = sorted((Path(__file__).resolve().parents[3] / "benchmarks/quality/experiments").glob("*.json"))
NANO = next(json.loads(path.read_text()) for path in FILES if path.stem == "nano")


def data(folder: str = "/data") -> Data:
    return Data(Path(folder), "bytes", "d" * 64, 10**8, 10**6)


def parse(body: Any) -> Experiment:
    return parse_experiment(body, "e.json", "e")


def changed(path: str, value: Any) -> Any:
    body = copy.deepcopy(NANO)
    *parents, last = path.split(".")
    place = body
    for name in parents:
        place = place[name]
    place[last] = value
    return body


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


def test_seeds_change_data_order_and_rounding_and_nothing_else() -> None:
    first, second = (run.arguments for run in experiment_runs(parse(changed("from_warm.seeds", [5, 3])), data())[::3])
    differing = [a for a, b in zip(first, second, strict=True) if a != b]
    assert differing == ["5", "5"]
    assert first[first.index("--seed") + 1] == first[first.index("--snip-seed") + 1] == "5"


def test_runs_from_a_warm_checkpoint_save_what_they_load() -> None:
    """Megatron ends in a KeyError if it loads an optimizer under --no-save-optim."""
    runs = experiment_runs(parse(changed("from_warm.save", True)), data())
    assert any("--no-save-optim" in run.arguments for run in runs)
    for run in runs:
        command = training_command(run.arguments, 1)
        assert not ("--load" in command and {"--no-save-optim", "--no-save-rng"} & set(command))


def test_identity_follows_text_and_weights_but_not_folders() -> None:
    run = experiment_runs(parse(NANO), data())[0]
    assert run.identity(data("/a"), "w") == run.identity(data("/b"), "w")
    assert run.identity(data(), "w") != run.identity(data(), "v")
    other = Data(Path("/data"), "bytes", "e" * 64, 10**8, 10**6)
    assert run.identity(other, "w") != run.identity(data(), "w")
    filled = fill(run.arguments, {"data": "/a b", "warm": "/w", "run": "/r"})
    assert "/a b/train" in filled
    assert not any("{" in argument for argument in filled)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", "snip.experiment/9", 'e.json: "schema" must be "snip.experiment/1"'),
        ("training.micro_batch", 3, "e.json: training.global_batch: 4 is no multiple of micro_batch"),
        ("warm", None, "e.json: from_warm needs warm"),
        ("from_warm.policies", ["best"], "e.json: from_warm.policies[0].policy: 'best' is unknown"),
        ("from_warm.policies", ["snip", {"policy": "snip"}], "e.json: from_warm.policies: 'snip' stands there twice"),
    ],
)
def test_faults_are_named_by_place(path: str, value: Any, message: str) -> None:
    assert refusal(parse, changed(path, value)).startswith(message)

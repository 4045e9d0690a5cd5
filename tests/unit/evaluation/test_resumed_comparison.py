"""The results from which a comparison goes on."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from snip_megatron.commands.compare import _results
from snip_megatron.evaluation.data import Data
from snip_megatron.evaluation.experiment import load_experiment
from snip_megatron.evaluation.results import record
from snip_megatron.evaluation.runs import experiment_runs

NANO = Path(__file__).resolve().parents[3] / "benchmarks" / "experiments" / "nano.json"


def test_runs_of_the_file_as_it_is_come_after_those_of_its_earlier_content(tmp_path: Path) -> None:
    """The last of several runs of a policy and seed is the one that tables show."""
    data = Data(tmp_path, "bytes", "0" * 64, 1000, 100)
    args = argparse.Namespace(out=tmp_path, resume=True, data=tmp_path)
    now = load_experiment(NANO)
    edited = dataclasses.replace(now, validation_tokens=2 * now.validation_tokens)
    results = _results(args, now, data)
    results.warm["w"] = {}
    identities = {}
    for experiment in (now, edited):  # edited, and then edited back
        runs = experiment_runs(experiment, data)
        identities[experiment] = [run.identity(data, "w") for run in runs]
        for run, identity in zip(runs, identities[experiment], strict=True):
            results.runs[identity] = record(run, identity, warm_sha256="w", status="done")
    results.save()
    assert list(_results(args, edited, data).runs) == [*identities[now], *identities[edited]]
    assert list(_results(args, now, data).runs) == [*identities[edited], *identities[now]]

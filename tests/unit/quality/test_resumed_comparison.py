"""The results from which a comparison goes on, and the folder in which it works."""

import argparse
import dataclasses
import functools
import json
import operator
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.quality import compare, validate_proxy
from benchmarks.quality.compare import _results, alone, main
from benchmarks.quality.comparison import Comparison, make_part
from benchmarks.quality.experiment import load_experiment
from benchmarks.quality.models import Data
from benchmarks.quality.results import Results, record
from benchmarks.quality.runner import Pool
from benchmarks.quality.runs import experiment_runs
from snip_megatron.precision.errors import SnipError

NANO = Path(__file__).resolve().parents[3] / "benchmarks/quality/experiments" / "nano.json"


def test_runs_of_the_file_as_it_is_come_after_those_of_its_earlier_content(tmp_path: Path) -> None:
    """The last of several runs of a policy and seed is the one that tables show."""
    data = Data(tmp_path, "bytes", "0" * 64, 1000, 100)
    args = argparse.Namespace(out=tmp_path, resume=True, data=tmp_path)
    now = load_experiment(NANO)
    edited = dataclasses.replace(now, validation_tokens=2 * now.validation_tokens)
    results = _results(args, now, data)
    results.warm["w"] = {"steps": 8}
    identities = {}
    for experiment in (now, edited):  # edited, and then edited back
        runs = experiment_runs(experiment, data)
        identities[experiment] = [run.identity(data, "w") for run in runs]
        for run, identity in zip(runs, identities[experiment], strict=True):
            results.runs[identity] = record(run, identity, warm_sha256="w", status="failed")
    results.save()
    assert list(_results(args, edited, data).runs) == [*identities[now], *identities[edited]]
    assert list(_results(args, now, data).runs) == [*identities[edited], *identities[now]]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("runs", 0, "commit"), None),
        (("runs", 0, "seed"), []),
        (("runs", 0, "side_by_side"), []),
        (("data", "tokens"), "many"),
        (("experiment", "model"), None),
        (("experiment", "phases"), 3),
    ],
    ids=str,
)
def test_a_damaged_result_is_one_line(
    place: tuple[Any, ...], value: Any, prepared: Path, refused: Callable[..., str]
) -> None:
    """``None`` stands for a field that is missing."""
    body = json.loads((NANO.parents[2] / "results/quality/compare_26m-cost_h200_2026-11-21.json").read_text())
    owner = functools.reduce(operator.getitem, place[:-1], body)
    if value is None:
        del owner[place[-1]]
    else:
        owner[place[-1]] = value
    path = prepared / "nano.json"
    path.write_text(json.dumps(body))
    again = (NANO, "--data", prepared, "--gpus", "0", "--out", prepared, "--resume")
    for arguments in (("--report", path), again):
        assert refused(*arguments).startswith(f"{path}: is no result file of compare (")


@pytest.fixture(autouse=True)
def own_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (compare, validate_proxy):
        monkeypatch.setattr(command, "stop_on_signals", lambda pool: [])  # the signals are pytest's here


def test_two_comparisons_do_not_write_one_result(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each would overwrite the runs of the other."""
    out = prepared / "out"
    arguments = [str(NANO), "--data", str(prepared), "--gpus", "0", "--out", str(out)]
    codes = []

    def run(comparison: Comparison) -> int:
        comparison.parts[0].results.save()
        codes.append(main([*arguments, "--work", str(prepared / "second"), "--resume"]))
        return 0

    monkeypatch.setattr(Comparison, "run", run)
    assert main([*arguments, "--work", str(prepared / "first")]) == 0
    assert codes == [2]
    assert capsys.readouterr().err == (
        f"compare: {out / 'nano.json'}: another comparison writes it; wait for it or give another --out\n"
    )


def test_a_work_folder_that_cannot_be_made_is_one_line(prepared: Path, refused: Callable[..., str]) -> None:
    (prepared / "file").write_text("")
    out = prepared / "file" / "out"
    line = refused(NANO, "--data", prepared, "--gpus", "0", "--out", out)
    assert line.startswith(f"{out / 'work'}: cannot be written (")


def test_a_training_that_a_killed_comparison_left_holds_the_work_folder(tmp_path: Path) -> None:
    """Another comparison would remove the run directory in which it writes, and train there beside it."""
    work, log = tmp_path / "work", tmp_path / "log"
    killed = f"""
import os, signal, sys
from pathlib import Path
from benchmarks.quality.compare import alone
from benchmarks.quality.runner import Job, Pool
training = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
with alone(Path({str(work)!r})):
    pool = Pool([None], {{}})
    pool.add([Job("run", [sys.executable, "-c", training], Path({str(log)!r}))])
    pool.run(print, lambda: Path({str(log)!r}).read_text() and os.kill(os.getpid(), signal.SIGKILL))
"""
    subprocess.run([sys.executable, "-c", killed], timeout=100, check=False)
    training = psutil.Process(int(log.read_text()))
    with pytest.raises(SnipError, match="or a training that it left"), alone(work):
        pass
    training.kill()
    psutil.wait_procs([training], timeout=10)
    with alone(work):
        pass


def test_a_comparison_is_complete_with_all_runs_from_one_checkpoint(tmp_path: Path) -> None:
    """Those from different warm weights are not compared with each other."""
    data, experiment = Data(tmp_path, "bytes", "0" * 64, 1000, 100), load_experiment(NANO)
    part = make_part(experiment, data, Results(tmp_path / "nano.json", {}, {}, warm={"a": {}, "b": {}}), tmp_path)

    def left(**done: tuple[int, ...]) -> int:
        ran = [(part.runs[i].identity(data, sha), part.runs[i]) for sha, runs in done.items() for i in runs]
        part.results.runs = {identity: record(run, identity, status="done") for identity, run in ran}
        for entry in part.results.runs.values():
            entry["seconds"] = 1.0
        return Comparison([part], Pool([None], {}, deadline=0.0), tmp_path, {}).run()

    assert left() == 3
    assert left(a=(0, 1)) == 1
    assert left(a=(0, 1), b=(2,)) == 1
    assert left(a=(0, 1, 2)) == left(a=(0, 1, 2), b=(2,)) == 0


def test_seeds_of_all_experiments_are_made_one_after_the_other(tmp_path: Path) -> None:
    """A comparison that is stopped then has whole seeds of each experiment."""
    data, nano = Data(tmp_path, "bytes", "0" * 64, 1000, 100), load_experiment(NANO)
    branches = dataclasses.replace(nano.phases[0], seeds=(1, 2))
    first = dataclasses.replace(nano, phases=(branches, dataclasses.replace(branches, kind="from_scratch")))
    second = dataclasses.replace(first, name="second", validation_tokens=2 * nano.validation_tokens)
    parts = [make_part(each, data, Results(tmp_path / each.name, {}, {}), tmp_path) for each in (first, second)]
    for part in parts:
        assert part.warm is not None
        (part.warm.folder / "iter_0000008").mkdir(parents=True, exist_ok=True)
        (part.warm.folder / "weights.json").write_text('{"8": "a"}')
    comparison = Comparison(parts, Pool([None], {}, deadline=0.0), tmp_path, {})
    assert comparison.run() == 24
    queued = [comparison._queued[job.name] for job in comparison.pool._waiting]
    assert [(run.kind, run.seed) for run in queued] == [
        (kind, seed) for kind in ("from_warm", "from_scratch") for seed in (1, 2) for _ in range(6)
    ]

"""Comparisons: their pool of processes, the devices of a run, and the results from which they go on."""

import argparse
import dataclasses
import functools
import json
import operator
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality import compare, validate_proxy
from benchmarks.quality.compare import _results, devices, main
from benchmarks.quality.comparison import Comparison, make_part
from benchmarks.quality.experiment import load_experiment
from benchmarks.quality.models import Data
from benchmarks.quality.results import Results, record
from benchmarks.quality.runner import Job, Outcome, Pool
from benchmarks.quality.runs import experiment_runs
from benchmarks.quality.warm import HASHES, warm_checkpoint

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
        (("data", "tokens"), "many"),
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


def job(tmp: Path, name: str, code: str, **fields: object) -> Job:
    return Job(
        name,
        [sys.executable, "-S", "-c", code],
        tmp / "logs" / f"{name}.txt",
        **fields,
    )  # type: ignore[arg-type]


def run(pool: Pool, jobs: list[Job]) -> tuple[dict[str, Outcome], int]:
    outcomes: dict[str, Outcome] = {}
    pool.add(jobs)
    left = pool.run(lambda outcome: outcomes.update({outcome.job.name: outcome}))
    return outcomes, left


def test_processes_run_side_by_side_on_the_devices_of_their_slots(tmp_path: Path) -> None:
    """Each waits for all the others: they end only if all four run at once."""
    code = f"""
import os, time
open({str(tmp_path)!r} + "/" + str(os.getpid()) + ".here", "w").write(os.environ["CUDA_VISIBLE_DEVICES"])
while sum(n.endswith(".here") for n in os.listdir({str(tmp_path)!r})) < 4: time.sleep(.02)
"""
    outcomes, left = run(Pool(["0", "1", "0", "1"], {}), [job(tmp_path, f"j{i}", code) for i in range(4)])
    assert left == 0
    assert [o.error for o in outcomes.values()] == [None] * 4
    assert sorted(path.read_text() for path in tmp_path.glob("*.here")) == ["0", "0", "1", "1"]


def test_a_failed_run_is_tried_twice_and_stops_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = f"import sys; open({str(tmp_path / 'tries')!r}, 'a').write('x'); print('noise'); sys.exit('what went wrong')"
    unbuffered = {"PYTHONUNBUFFERED": "1"}  # as a comparison sets it: the error is the last line of the log
    outcomes, left = run(Pool([None], unbuffered), [job(tmp_path, "bad", bad), job(tmp_path, "good", "pass")])
    assert left == 0
    assert list(outcomes) == ["good", "bad"]  # the second try is behind the others
    assert outcomes["good"].error is None
    assert outcomes["bad"].error == "exit code 1: what went wrong"
    assert (tmp_path / "tries").read_text() == "xx"
    assert "what went wrong" in (tmp_path / "logs" / "bad.txt.1").read_text()
    assert re.fullmatch(
        r"bad failed after \d+ s and is tried again: exit code 1: what went wrong\n", capsys.readouterr().err
    )


def test_a_run_whose_arguments_are_refused_is_tried_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes, left = run(Pool([None], {}), [job(tmp_path, "bad", "print('no such option'); raise SystemExit(2)")])
    assert (left, outcomes["bad"].error) == (0, "exit code 2: no such option")
    assert capsys.readouterr().err == ""
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["bad.txt"]


def test_the_deadline_ends_what_still_runs(tmp_path: Path) -> None:
    pool = Pool([None], {}, deadline=time.monotonic() + 0.5)
    outcomes, left = run(pool, [job(tmp_path, "endless", "import time; time.sleep(1000)")])
    assert (outcomes, left, pool.busy) == ({}, 1, 0)


@pytest.mark.parametrize(
    ("gpus", "ranks", "per_gpu", "expected"),
    [
        ([], 1, None, [None]),
        ([], 2, 3, [None] * 3),
        (["0", "1"], 1, 2, ["0", "1", "0", "1"]),
        (["0"], 1, None, ["0"] * 8),
        (["0", "1", "2", "3", "4"], 2, None, ["0,1", "2,3"]),
        (["4", "5"], 2, 2, ["4,5", "4,5"]),
    ],
)
def test_a_run_of_several_ranks_has_as_many_gpus(
    gpus: list[str], ranks: int, per_gpu: int | None, expected: list[str | None]
) -> None:
    assert devices(gpus, ranks, per_gpu) == expected


@pytest.mark.parametrize("fmt", ["fp9", "bf16", "nvfp4_hadamard"])
def test_a_format_that_cannot_be_compared_is_refused_before_the_warm_run(
    fmt: str, prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = map(str, (NANO, "--data", prepared, "--out", prepared / "out", "--gpus", "0", "--format", fmt))
    with pytest.raises(SystemExit, match="2"):
        validate_proxy.main(list(arguments))
    assert fmt in capsys.readouterr().err
    assert not (prepared / "out").exists()


def test_a_warm_checkpoint_whose_weights_were_removed_is_trained_again(tmp_path: Path) -> None:
    warm = warm_checkpoint(load_experiment(NANO), Data(tmp_path, "bytes", "0" * 64, 1000, 100), tmp_path)
    assert warm.sha256 is None
    weights = warm.folder / "iter_0000008"
    weights.mkdir(parents=True)
    (warm.folder / HASHES).write_text(json.dumps({"8": "abc"}))
    assert warm.sha256 == "abc"
    weights.rmdir()
    assert warm.sha256 is None

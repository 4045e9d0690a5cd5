"""The joins behind the report: adoptions with their maps and scores, updates with their times."""

import json

import pytest
import synthetic_run
from small_runs import new_run

from snip_megatron.runtime.run_data import load_run


def test_adoptions_carry_their_map_and_scores(whole_run):
    run = load_run(whole_run)
    assert [(a.step, a.version) for a in run.adoptions] == [(15, 1), (35, 2), (55, 3), (75, 4), (95, 5)]
    for adoption in run.adoptions:
        assert adoption.precision_map.version == adoption.version
        assert adoption.scores.keys() == adoption.precision_map.choices.keys()
        assert adoption.achieved == 0.75
    scores = json.loads((whole_run / "scores" / "step_30.json").read_text())
    assert run.adoptions[1].scores == scores["scores"]
    assert run.unreadable == []


def test_updates_carry_their_times(whole_run):
    updates = load_run(whole_run).updates
    assert [(u.version, u.step, u.adopted_step) for u in updates] == [
        (i + 1, 10 + 20 * i, 15 + 20 * i) for i in range(5)
    ]
    for update in updates:
        assert update.probes_s > 1.5
        assert update.latency_s == 0.8
        assert update.wait_s == pytest.approx(0.9 + 0.7 + 0.12 + 0.002 + 0.0 + 0.004)
        assert update.status == "optimal"
    assert updates[0].changed == len(synthetic_run.LINEARS) * 3


def test_scores_are_found_by_version(tmp_path):
    first, second = {"a": {}}, {"b": {}}
    with new_run(tmp_path) as run:
        for step, version, scores in ((2, 1, first), (6, 2, second)):
            run.event(step, "submit", version=version)
            run.write_scores(step, scores, version=version)
        run.event(7, "adopt", version=1)  # after the second update was submitted
    assert load_run(tmp_path).adoptions[0].scores == first


def test_what_an_update_changed_is_what_its_first_adoption_did(tmp_path):
    """The phases of a plan share its version, and are adopted one after another."""
    with new_run(tmp_path) as run:
        run.event(2, "submit", version=1)
        run.event(4, "adopt", version=1, changed=12)
        run.event(40, "adopt", version=1, changed=0)
        run.event(60, "adopt", version=1, changed=3)
    (update,) = load_run(tmp_path).updates
    assert (update.adopted_step, update.changed) == (4, 12)
    assert [adoption.step for adoption in load_run(tmp_path).maps] == [4, 60]


def test_a_second_solution_belongs_to_the_update_of_its_statistics(tmp_path):
    with new_run(tmp_path) as run:
        run.event(2, "submit", version=1, wait_s=0.5)
        run.event(4, "rise", version=1, wait_s=0.25)
        run.event(4, "rejected", version=1, again=2)
        run.event(5, "solved", version=2, status="optimal")
        run.event(6, "rise", version=2, wait_s=0.25)
        run.event(6, "adopt", version=2, changed=3)
    (update,) = load_run(tmp_path).updates
    assert (update.version, update.adopted_step, update.wait_s) == (1, 6, 1.0)


def test_outcomes_that_are_no_adoption(tmp_path):
    with new_run(tmp_path) as run:
        run.event(2, "collect", seconds=0.1)
        run.event(2, "submit", version=1)
        run.event(4, "postpone", version=1, until=6)
        run.event(6, "postpone", version=1, until=8)
        run.event(7, "solve_failed", version=1, reason="infeasible", message="stage 0")
        run.event(9, "probe", kind="statistics", seconds=0.2)
        run.event(9, "dropped", reason="not finite")
    failed, dropped = load_run(tmp_path).updates
    assert (failed.status, failed.postponed, failed.adopted_step) == ("failed: infeasible", 2, None)
    assert (dropped.status, dropped.version, dropped.probes_s) == ("dropped: not finite", None, 0.2)
    assert [e["event"] for e in load_run(tmp_path).faults] == ["solve_failed", "dropped"]  # a late answer is none

"""Candidates of an update compared by the measured rise of the loss; the forwards that measure it are scripted."""

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scripted_controller import LATE, Run, Script, a_map
from sidecar_jobs import make_job

from snip_megatron.precision import Format, PrecisionMap, fp4_fraction
from snip_megatron.runtime.rise import Comparison, Rise
from snip_megatron.runtime.solving import Candidate, solve_job
from snip_megatron.runtime.state import ControllerState

pytestmark = pytest.mark.usefixtures("one_rank")

BOUNDED = {"budget": "loss=0.002", "formats": ("bf16", "fp8", "fp4")}


def candidate(
    fmt: Format, predicted: float, *, policy: str = "snip", version: int = 1, backward: float = 0.0
) -> Candidate:
    return Candidate(a_map(fmt, version), policy, predicted, backward)


def rise(mean: float, error: float = 1e-4) -> Rise:
    return Rise(mean, error, 1000)


class Measured:
    """Returns scripted rises by the format of a uniform map, and notes what it was asked."""

    def __init__(self, **rises: float) -> None:
        self.rises, self.asked = rises, list[list[str]]()

    def __call__(self, maps: Sequence[PrecisionMap]) -> list[Rise]:
        self.asked.append([next(iter(each.choices.values())).value for each in maps])
        return [rise(self.rises[name]) for name in self.asked[-1]]


def test_a_rise_is_the_mean_with_its_standard_error() -> None:
    differences = np.random.default_rng(1).normal(0.01, 0.3, 500)
    result = Rise.of(500, differences.sum(), (differences**2).sum())
    assert result.mean == pytest.approx(differences.mean())
    assert result.error == pytest.approx(differences.std(ddof=1) / np.sqrt(500))
    assert Rise.of(1, 0.5, 0.25) == Rise(0.5, None, 1)


def test_candidates_are_compared_with_what_their_backwards_are_predicted_to_cost() -> None:
    solution, rule = candidate(Format.FP8, 1e-3, backward=1e-4), candidate(Format.FP4, 9e-4, backward=8e-4)
    assert Comparison((solution, rule), (rise(1.5e-3), rise(1e-3)), None).best == 0
    assert Comparison((solution, rule), (rise(1.9e-3), rise(1e-3)), None).best == 1
    assert Comparison((solution, solution), (rise(1e-3), rise(1e-3)), None).best == 0


@pytest.mark.parametrize(
    ("mean", "before", "after"),
    [(8e-3, 1.0, 8.0), (8e-3, 2.0, 16.0), (2.1e-3, 1.0, 1.0), (5e-4, 4.0, 2.0), (1e-5, 4.0, 1.0), (9e-4, 4.0, 4.0)],
)
def test_predictions_are_corrected_beyond_the_error_alone(mean: float, before: float, after: float) -> None:
    """A rise counts that is more than two errors above the bound, or more than two below the prediction."""
    comparison = Comparison((candidate(Format.FP8, 1e-3),), (rise(mean),), 0.002)
    assert comparison.corrected(before) == after
    assert replace(comparison, bound=None).corrected(before) == before


def test_the_bound_of_a_plan_holds_for_what_is_left_at_its_end() -> None:
    plan = replace(candidate(Format.FP8, 1e-2), weight=0.1)
    assert not Comparison((plan,), (rise(1.5e-2),), 0.002).breaks_bound(0)
    assert Comparison((plan,), (rise(3e-2),), 0.002).breaks_bound(0)


def test_the_better_map_as_measured_is_adopted() -> None:
    """It is ``backward-first`` here, and the event of its adoption says what was measured."""
    both = (candidate(Format.FP8, 1e-3), candidate(Format.FP4, 2e-3, policy="backward-first"))
    run, measured = Run(Script({1: [LATE, both]})), Measured(fp8=3e-3, fp4=1e-3)
    run.steps(0, 8, measure=measured)
    assert measured.asked == [["fp8", "fp4"]]
    assert run.formats[6] is Format.FP4
    (fields,) = [fields for _, kind, fields in run.script.events if kind == "adopt"]
    assert (fields["policy"], fields["predicted_rise"], fields["measured_rise"]) == ("backward-first", 2e-3, 1e-3)
    assert (fields["measured_error"], fields["measured_tokens"]) == (1e-4, 1000)
    (of_rise,) = [fields for _, kind, fields in run.script.events if kind == "rise"]
    assert [each["measured_rise"] for each in of_rise["candidates"]] == [3e-3, 1e-3]


@pytest.mark.parametrize(("second", "adopted"), [(3e-3, Format.FP8), (9e-3, Format.FP4)])
def test_a_map_above_the_bound_is_solved_again_across_a_resume(
    second: float, adopted: Format, capsys: pytest.CaptureFixture[str]
) -> None:
    """The better of both is adopted, and later updates are predicted with the correction."""
    script = Script({1: [(candidate(Format.FP4, 1e-3),)]})
    run = Run(script, **BOUNDED)
    run.steps(0, 5, measure=Measured(fp4=8e-3))
    assert (script.of("adopt"), script.of("rejected")) == ([], [4])
    said = "snip: step 4: no map of update 1 keeps the loss within 0.002; solving again with predictions x 8\n"
    assert said in capsys.readouterr().out
    restored = ControllerState.from_bytes(run.controller.state_to_save())
    again = Script({2: [(candidate(Format.FP8, 1.9e-3, version=2),)], 3: [LATE]})
    resumed, measured = Run(again, restored, **BOUNDED), Measured(fp4=8e-3, fp8=second)
    resumed.steps(5, 9, measure=measured)
    assert measured.asked == [["fp8", "fp4"]]
    assert again.of("adopt") == [6]
    assert resumed.formats[6] is adopted
    assert [version for _, version in again.submitted] == [2, 3]
    tables = [table.meta["correction"] for table in again.tables]
    assert tables == [8.0, pytest.approx(8.0 * second / 1.9e-3, rel=1e-3)]


def test_a_state_of_an_older_version_loads() -> None:
    body = json.loads(ControllerState().to_bytes())
    del body["correction"]
    assert ControllerState.from_bytes(json.dumps(body).encode()).correction == 1.0


def test_the_rule_at_the_same_share_is_a_second_candidate() -> None:
    job = make_job()
    noise = replace(job, request=replace(job.request, estimator="noise"))
    solution, rule = solve_job(noise).candidates
    assert (solution.policy, rule.policy) == ("snip", "backward-first")
    flops = {row.name: row.flops for row in job.table.linears}
    assert min(fp4_fraction(each.precision_map, flops) for each in (solution, rule)) >= 0.5
    # By the update's own scores, the update's own map is the best.
    assert solution.predicted + solution.backward <= rule.predicted + rule.backward
    assert solution.precision_map.objective == pytest.approx(solution.predicted + solution.backward, rel=1e-3)
    assert rule.precision_map.objective == pytest.approx(rule.predicted + rule.backward, rel=1e-3)
    assert len(solve_job(job).candidates) == 1  # with the Fisher estimate, dgrads and wgrads cost nothing anyway
    paper = replace(noise, request=replace(noise.request, q="paper"))
    assert len(solve_job(paper).candidates) == 1

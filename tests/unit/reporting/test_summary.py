"""Whether a run was worth it: every figure from records whose times are known."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import synthetic_run

from snip_megatron.precision import Format, Gemm, PrecisionMap
from snip_megatron.precision.phases import PlanPhase, PrecisionPlan
from snip_megatron.reporting.report import render
from snip_megatron.reporting.summary import TRUE_OVER_PREDICTED, RunSummary, headline, lines, summarise
from snip_megatron.runtime.run_data import load_run
from snip_megatron.runtime.run_directory import RunDirectory

HOPPER = {"gemm_backend": "hopper", "device": "NVIDIA H200", "train_iters": 1000}
FIRST, STEPS = 30, 120  # the map is adopted at step 35


def a_run(tmp: Path, bf16: float = 2.0, mapped: float = 1.0, updates: int = 1, **options: Any) -> RunSummary:
    facts = HOPPER | options.pop("facts", {})
    path = synthetic_run.write_run(
        tmp / "run", updates=updates, steps=STEPS, first=FIRST, seconds=(bf16, mapped), facts=facts, faults=False,
        **options,
    )  # fmt: skip
    return summarise(load_run(path))


def test_a_run_that_saves_time(tmp_path: Path) -> None:
    worth = a_run(tmp_path)
    assert (worth.verdict, worth.warnings) == ("yes", ())
    assert (worth.bf16_s, worth.bf16_steps, worth.updates) == (2.0, 29, 1)  # 3 steps settle twice
    waits = ("probe", "collect", "submit", "adopt")
    cost = sum(event["wait_s"] for event in load_run(tmp_path / "run").events if event["event"] in waits)
    assert worth.cost_s == pytest.approx(cost)
    assert worth.saved_s == pytest.approx(85 * 1.0 - cost)
    # 880 steps are left, and 44 updates, each of which costs what the only one did
    assert worth.saved_run_s == pytest.approx(85 - cost + 880 - 44 * cost)
    before, under = worth.maps
    assert (before.quantised, under.version, under.speedup) == (False, 1, 2.0)
    text = "\n".join(lines(worth))
    assert headline(worth).startswith("Worth it: yes. Saved 83.")
    assert worth.gpu_hours_saved == pytest.approx(2 * worth.saved_s / 3600)  # of two ranks
    assert headline(worth).endswith(f"costs of SNIP included: +{worth.gpu_hours_saved:.2g} GPU hours so far.")
    assert "so far, saved " in headline(worth)
    assert "A step took 2.0 s in bf16 (median of 29 steps), 1.0 s under map 1 (85 steps, mean 1.0 s): 2.00 x." in text
    assert "1 update cost 1.7 s, 1.10% of the time: probes 1.6 s" in text
    assert "Peak of GPU memory on rank 0: 2.00 GiB, 1.00 GiB before the first update." in text
    body = json.loads(json.dumps(worth.as_dict()))
    assert body["schema"] == "snip.worth/1"
    assert body["maps"][1]["speedup"] == 2.0


def test_the_loss_is_that_of_the_chosen_formats(tmp_path: Path) -> None:
    worth = a_run(tmp_path, config={"q": "split"})
    adoption = load_run(tmp_path / "run").adoptions[-1]
    assert adoption.precision_map.objective is not None
    assert (worth.loss.version, worth.loss.backward) == (1, True)
    assert worth.loss.nats == pytest.approx(adoption.precision_map.objective)
    assert worth.loss.low == pytest.approx(TRUE_OVER_PREDICTED[0] * worth.loss.nats)
    assert worth.loss.steps is None  # 120 noisy losses hide how fast the loss falls
    text = "\n".join(lines(worth))
    losses = load_run(tmp_path / "run").series("loss")[1][-20:]
    assert worth.loss.bf16_loss == pytest.approx(sum(losses) / 20 - worth.loss.nats)
    assert f"Map 1 is predicted to raise the loss by {worth.loss.nats:.2g} nats over bf16" in text
    assert f"({100 * worth.loss.nats / worth.loss.bf16_loss:.2g} % of this run's bf16 loss; " in text
    assert "without the formats of dgrad" not in text


def test_with_phases_the_rise_now_and_the_rise_that_the_budget_bounds_are_told_apart(tmp_path: Path) -> None:
    """A map of a phase may raise the loss by more than the budget, which bounds what is left when training ends."""
    a_run(tmp_path, config={"q": "split", "budget": "loss=0.002"})
    run = load_run(tmp_path / "run")
    last = run.adoptions[-1]
    assert last.precision_map is not None
    maps = (dataclasses.replace(last.precision_map, objective=nats) for nats in (0.0004, 0.0015))
    phases = tuple(map(PlanPhase, (last.step, 900), maps))
    plan = PrecisionPlan(phases, 1000, last.version or 0, objective=7.7)  # seconds: what loss= minimises
    text = "\n".join(lines(summarise(dataclasses.replace(run, plans={last.step: plan}))))
    assert "nats while it is in force, over bf16 at equal weights" in text
    assert "0.0019 nats are predicted to be left at the end of training: --snip-budget loss=0.002 bounds this" in text
    assert "at the end of training" not in "\n".join(lines(summarise(run)))


def test_maps_that_bring_nothing_are_said_with_a_remedy(tmp_path: Path) -> None:
    worth = a_run(tmp_path, bf16=1.0, mapped=1.1)
    assert worth.verdict == "no"
    (warning,) = worth.warnings
    assert "not faster than in bf16 (0.91 x)" in warning
    assert "--snip without a budget" in warning
    assert headline(worth).startswith("Worth it: no. Lost ")


def test_a_loss_that_costs_more_than_was_saved(tmp_path: Path) -> None:
    """A slow fall of the loss makes its predicted rise expensive."""
    path = tmp_path / "run"
    synthetic_run.write_run(path, updates=1, steps=40, first=FIRST, faults=False, config={"q": "split"}, facts=HOPPER)
    rows = [
        {"time": 0.0, "step": step, "loss": 3.0 - 1e-6 * step, "step_s": 2.0 if step < 35 else 1.9}
        for step in range(1000)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    worth = summarise(load_run(path))
    assert worth.loss.steps == pytest.approx(worth.loss.nats / 1e-6, rel=1e-3)
    assert worth.verdict == "no"
    assert "the predicted rise of the loss costs more training time than was saved" in worth.warnings[0]
    assert "at present the loss falls by as much in about" in "\n".join(lines(worth))
    # The fall is there, but its noise is larger.
    synthetic_run.rewrite(path, "metrics.jsonl", lambda row: row.update(loss=row["loss"] + 0.01 * (row["step"] % 2)))
    assert summarise(load_run(path)).loss.steps is None


def test_predicted_speedups_are_those_of_the_stored_times(tmp_path: Path) -> None:
    each = {gemm.value: {"bf16": 2.0, "fp8": 1.0, "fp4": 1.0} for gemm in Gemm}
    kinds = {linear.rpartition(".layers.")[2].partition(".")[2] for linear in synthetic_run.LINEARS}
    times = {"model": "test", "seconds": dict.fromkeys(kinds, each), "rest": {"0": 72.0, "1": 8.0}}
    facts = {"predicted_times": times, "linear_stages": {name: i // 12 for i, name in enumerate(synthetic_run.LINEARS)}}
    worth = a_run(tmp_path, bf16=1.0, mapped=0.95, facts=facts, config={"update_interval": 0})
    # 12 linears a stage: 72 s of 3 GEMMs of 2 s each, halved by the map, beside 72 s on the slower stage
    assert worth.maps[-1].predicted == pytest.approx(144 / 108)
    assert (worth.fp8, worth.over_fp8) == ("fp8", pytest.approx(1.0))  # fp8 everywhere is as fast
    assert ", 950.0 ms with fp8 in every GEMM, as computed from times of GEMMs." in "\n".join(lines(worth))
    page = render(load_run(tmp_path / "run"))
    assert "<dt>speedup over bf16, measured; predicted 1.333</dt><dd>1.053</dd>" in page
    assert worth.verdict == "yes"
    assert "less than half of the predicted gain was measured (1.05 x, predicted 1.33 x)" in worth.warnings[0]


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"gemm_backend": "reference", "device": "cpu"}, "formats are emulated on cpu"),
        ({"gemm_backend": "emulated", "device": "NVIDIA A100"}, "formats are emulated on NVIDIA A100"),
        ({"batch_size_ramps": True}, "the batch size ramps up"),
    ],
)
def test_speed_that_means_nothing_is_not_judged(tmp_path: Path, facts: dict[str, Any], why: str) -> None:
    worth = a_run(tmp_path, bf16=1.0, mapped=3.0, facts=facts)
    assert (worth.verdict, worth.warnings, worth.saved_s, worth.saved_run_s) == ("not judged", (), None, None)
    assert why in worth.why
    text = "\n".join(lines(worth))
    assert headline(worth).startswith(f"Worth it: not judged. {why[0].upper()}{why[1:]}")
    assert "3.0 s under map 1 (85 steps, mean 3.0 s)." in text
    assert " x" not in text.partition("Map 1 is")[0]


def test_too_few_steps_in_bf16_or_under_a_map(tmp_path: Path) -> None:
    few = summarise(load_run(synthetic_run.write_run(tmp_path / "a", first=3, seconds=(2.0, 1.0), facts=HOPPER)))
    assert few.verdict == "not judged"
    assert "--snip-first-update" in few.why
    path = synthetic_run.write_run(tmp_path / "b", first=30, steps=42, seconds=(2.0, 1.0), facts=HOPPER)
    assert summarise(load_run(path)).verdict == "too early"
    none = synthetic_run.write_run(tmp_path / "c", updates=0, seconds=(2.0, 1.0), facts=HOPPER)
    assert summarise(load_run(none)).verdict == "no map"
    old = synthetic_run.write_run(tmp_path / "d")
    assert summarise(load_run(old)).why == "times of steps are not recorded"


def test_an_update_that_a_short_run_has_not_paid_for_pays_in_longer_ones(tmp_path: Path) -> None:
    """The run has 85 steps under its map, each 20 ms shorter; the update costs 1.7 s, and a job has one in 1,000."""
    facts = {"train_iters": STEPS}
    worth = a_run(tmp_path, bf16=0.12, mapped=0.1, facts=facts, config={"update_interval": 1000})
    assert (worth.verdict, worth.warnings) == ("in longer runs", ())
    assert 85 < worth.steps_to_pay < 100
    assert headline(worth).startswith(
        "Worth it: in longer runs. A step under map 1 is 1.20 x as fast as in bf16, and an"
    )
    assert f"pays for itself after {worth.steps_to_pay} steps" in "\n".join(lines(worth))
    never = a_run(tmp_path / "slower", bf16=0.1, mapped=0.1, facts=facts, config={"update_interval": 1000})
    assert (never.verdict, never.steps_to_pay) == ("no", None)


SUBMIT = (4, "submit", dict[str, Any]())


@pytest.mark.parametrize(
    ("events", "config", "cause"),
    [
        ([], {}, "none was due, because the first update is before step 100: train longer, or use --snip-first-update"),
        ([], {"update_interval": 0}, "--snip-update-interval 0 makes no other maps"),
        ([(9, "adopt", {"version": 0})], {"policy": "bf16"}, "--snip-policy bf16 makes no other maps"),
        ([(4, "skipped", {"reason": "training ends"})], {}, "an update was left out (training ends)"),
        ([(4, "dropped", {"reason": "no memory"})], {}, "an update was dropped (no memory)"),
        ([(4, "postpone", {"reason": "kernels", "until": 14})], {}, "kernels until step 14: --snip-wait 120 waits"),
        ([SUBMIT], {}, "the map of the update of step 4 is adopted at step 9 at the earliest, and 8 steps"),
        ([SUBMIT, (9, "postpone", {"until": 14})], {}, "the map of the update of step 4 is adopted at step 14"),
        ([SUBMIT, (5, "solve_failed", {"message": "boom"})], {}, "the solver gave no map (boom)"),
        ([SUBMIT, (9, "adopt", {"version": 1})], {}, "the solver chose bf16 for every GEMM, because within"),
        ([SUBMIT, (9, "adopt", {"version": 1})], {}, "map 1 was adopted before step 9, and no step under it has ended"),
    ],
)
def test_why_no_map_was_adopted(
    tmp_path: Path, events: list[tuple[int, str, dict[str, Any]]], config: dict[str, Any], cause: str
) -> None:
    fmt = Format.FP8 if cause.startswith("map 1") else Format.BF16
    settings, facts = synthetic_run.CONFIG | {"first_update": 100} | config, HOPPER | {"first_update": 100}
    with RunDirectory(tmp_path / "run", settings, overwrite=False, resume_step=None, facts=facts) as run:
        run.write("maps", 9, PrecisionMap.uniform(synthetic_run.LINEARS, fmt, version=1).to_json())
        for step in range(8):
            run.metric(step, loss=3.0, grad_norm=1.0, fp4_fraction=0.0, step_s=1.0)
        for step, kind, fields in events:
            run.event(step, kind, **fields)
    said = headline(summarise(load_run(tmp_path / "run")))
    assert said.startswith(f"Worth it: no map. Every step so far was in bf16: {cause}")


@pytest.mark.parametrize(
    ("validations", "measured"),
    [
        ([(3, "map", 9.0), (3, "bf16", 1.0), (5, "bf16", 2.5), (5, "map", 2.625)], 0.125),
        ([(3, "map", 9.0), (3, "bf16", 1.0)], None),  # before the map
        ([(5, "map", 2.625), (6, "bf16", 2.5)], None),
    ],
)
def test_validation_in_both_formats_is_named(
    tmp_path: Path, validations: list[tuple[int, str, float]], measured: float | None
) -> None:
    path = tmp_path / "run"
    with RunDirectory(path, {"policy": "snip", "q": "split"}, overwrite=False, resume_step=None) as run:
        scores = synthetic_run.scores_of(synthetic_run.np.random.default_rng(1))
        run.write_scores(2, scores, version=1)
        run.write("maps", 4, synthetic_run.map_of(1, scores).to_json())
        run.event(4, "adopt", version=1)
        run.metric(4, loss=3.0, grad_norm=1.0, fp4_fraction=0.75, step_s=1.0)
        for step, formats, loss in validations:
            run.event(step, "validation", formats=formats, loss=loss)
    worth = summarise(load_run(path))
    assert worth.loss.measured == measured
    said = "the last validation differs by +0.12 between the map's formats and bf16"
    assert (said in "\n".join(lines(worth))) == (measured is not None)

"""Several runs on one page: figures against what the runs recorded, and what cannot be compared."""

import json
import re

import pytest
import synthetic_run
from snip_command import refused, snip

from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.precision.errors import SnipError
from snip_megatron.reporting.comparison import MAX_RUNS, differences, render_comparison, run_names, write_comparison
from snip_megatron.runtime.records.run_data import load_run
from snip_megatron.runtime.records.run_directory import RunDirectory

LINEAR = "decoder.layers.0.mlp.linear_fc1"


def short_run(path, losses, choices, *, policy, first=0):
    with RunDirectory(path, {"policy": policy, "seed": 1}, overwrite=False, resume_step=None) as run:
        for step, loss in enumerate(losses, start=first):
            run.metric(step, loss=loss, grad_norm=1.0, fp4_fraction=0.5)
        run.event(2, "probe", kind="statistics", seconds=2.0, wait_s=2.0)
        run.event(2, "submit", version=1, wait_s=0.5)
        shares = {"fp4": 0.5, "fp8": 0.496, "bf16": 0.004}
        run.event(3, "adopt", version=1, changed=3, formats=shares, wait_s=0.5)
        run.event(5, "adopt", version=1, changed=0, formats=shares)  # a phase with the same map
        run.write(
            "maps",
            3,
            PrecisionMap(choices={f"{LINEAR}:{g}": Format(f) for g, f in choices.items()}, version=1).to_json(),
        )
        run.event(9, "validation", loss=losses[-1] + 0.5)
    return path


def timed_run(path, step_s, loss, *, backend="hopper"):
    """200 steps with losses that alternate around ``loss``, in 64 sequences of 128 tokens."""
    facts = {"gemm_backend": backend, "device": "card", "world_size": 1, "global_batch_size": 64}
    config = {"policy": "bf16", "seq_length": 128}
    with RunDirectory(path, config, overwrite=False, resume_step=None, facts=facts) as run:
        for step in range(200):
            noise = 0.01 * (step % 3 - 1)
            run.metric(step, loss=loss + noise, grad_norm=1.0, fp4_fraction=0.0, step_s=step_s)
    return load_run(path)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ([(0.8, 3.0), (0.7, 3.2)], "Take 1: 1.25 × as fast as 0, and no worse as far as the loss shows."),
        ([(0.8, 3.2)], "A trade: 1 costs loss for its speed; else take 0."),
        ([(1.01, 3.0), (2.0, 2.0)], "Take 0: none is faster."),
        ([(1.0, 2.9)], "Take 1: as fast as 0, with less loss."),
    ],
)
def test_the_verdict_says_which_run_to_take(tmp_path, others, said):
    runs = [timed_run(tmp_path / str(i), *each) for i, each in enumerate([(1.0, 3.0), *others])]
    page = render_comparison(runs)
    assert f"<strong>{said}</strong>" in page
    if others[0] == (0.8, 3.2):
        assert re.search(r"1 is faster \(1\.25 × the tokens a second, .*; loss \+0\.2000 ± 0\.0\d+, worse\.", page)
        assert "<td>8192</td><td>1000</td><td>1000</td>" in page  # tokens a second, median and mean of a step


def test_emulated_runs_are_compared_by_the_loss_alone(tmp_path):
    runs = [timed_run(tmp_path / name, s, loss, backend="reference") for name, s, loss in (("a", 1, 3), ("b", 9, 2))]
    page = render_comparison(runs)
    assert "Speeds cannot be compared; by the loss, take b." in page


@pytest.fixture
def pair(tmp_path):
    formats = {"fprop": "fp8", "dgrad": "fp4", "wgrad": "fp4"}
    return [
        short_run(tmp_path / "a", [4.0] * 20, formats, policy="snip"),
        short_run(tmp_path / "b", [4.0] * 10 + [4.5] * 5, formats | {"dgrad": "fp8"}, policy="random"),
    ]


def figures_of(page):
    return json.loads(re.search(r'id="figures-data">(.*?)</script>', page)[1])


def test_figures(pair):
    figures = figures_of(render_comparison([load_run(path) for path in pair]))
    assert [trace["name"] for trace in figures["loss"]["data"]] == ["a", "b"]
    (distance,) = figures["distance"]["data"]
    assert distance["x"] == list(range(15))
    assert (distance["y"][9], distance["y"][14]) == (0.0, 0.5)


def test_table_is_over_the_steps_that_all_runs_have(pair):
    page = render_comparison([load_run(path) for path in pair])
    assert "loss (steps 13–14)" in page
    row_a, row_b = re.findall(r'<th scope="row">[ab]</th>.*?</tr>', page, re.DOTALL)
    cells = [re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<td.*?</td>", row_b)]
    assert cells[1:6] == ["15", "4.5000", "5.0000", "1", "50% fp4, 50% fp8"]
    assert "<td>20</td><td>4.0000</td><td>4.5000</td>" in row_a


def test_only_what_differs_is_listed(pair):
    assert differences([load_run(path) for path in pair]) == [("policy", ["snip", "random"])]


def test_names_stay_apart(tmp_path):
    runs = [load_run(short_run(tmp_path / p / "run", [1.0], {"fprop": "fp4"}, policy="x")) for p in ("one", "two")]
    assert run_names(runs) == ["one/run", "two/run"]


def test_hostile_names_and_empty_runs(tmp_path):
    whole = synthetic_run.write_run(tmp_path / "<img src=x onerror=alert(1)>")
    empty = synthetic_run.write_run(tmp_path / "empty", steps=0)
    page = render_comparison([load_run(whole), load_run(empty)])
    assert "<img" not in page.split("<body>")[1]
    assert figures_of(page)["distance"] is None
    assert all(figure is None for figure in figures_of(render_comparison([load_run(empty)] * 2)).values())


def test_command(pair, tmp_path):
    assert snip("report", *pair).stdout.strip() == str(pair[0] / "comparison.html")
    assert snip("report", *pair, "--out", tmp_path / "page.html").returncode == 0
    assert (tmp_path / "page.html").exists()
    for arguments in ([pair[0], pair[0]], [pair[0], tmp_path], [*pair, "--live"]):
        refused("report", *arguments)
    with pytest.raises(SnipError, match="too many"):
        write_comparison([tmp_path] * (MAX_RUNS + 1))

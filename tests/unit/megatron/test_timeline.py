"""What Megatron knows about the time of a run: its end, and the learning rate of every step."""

import argparse
from typing import Any

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from snip_megatron.megatron.compat import learning_rate
from snip_megatron.megatron.times import relative_rates, timeline_of
from snip_megatron.precision import LinearRow
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.sensitivity import SolveRequest

BATCH, STEPS = 8, 50
LINEARS = (LinearRow("decoder.layers.0.mlp.linear_fc1", 0, 4, 4),)


def scheduler(style: str = "cosine") -> OptimizerParamScheduler:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    return OptimizerParamScheduler(
        optimizer, 0.0, 1e-3, 1e-5, 5 * BATCH, STEPS * BATCH, style, 0.1, 0.1, STEPS * BATCH, "constant",
        wsd_decay_steps=20 * BATCH, lr_wsd_decay_style="linear",
    )  # fmt: skip


def arguments(**fields: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"train_iters": STEPS, "global_batch_size": BATCH, "train_samples": None} | fields)


def config(**fields: Any) -> SnipConfig:
    return SnipConfig(enabled=True, **fields)


@pytest.mark.parametrize("style", ["cosine", "linear", "WSD", "constant"])
@pytest.mark.parametrize("step", [0, 1, 7, 30])
def test_the_rate_of_every_step_is_what_megatron_s_scheduler_gives_there(style: str, step: int) -> None:
    megatron = scheduler(style)
    wanted = []
    for _ in range(STEPS):
        wanted.append(megatron.optimizer.param_groups[0]["lr"])
        megatron.step(BATCH)
    started = scheduler(style)
    started.step(step * BATCH)
    rate = learning_rate(started, arguments(), step)
    assert [rate(at) for at in range(STEPS)] == wanted
    assert started.num_steps == step * BATCH  # as it was
    started.step(3 * BATCH)
    assert rate(step) == wanted[step]  # whenever it is asked


def test_rates_are_relative_to_the_largest_and_cover_the_run_evenly() -> None:
    rate = learning_rate(scheduler("linear"), arguments(), 0)
    rates = relative_rates(rate, 5, STEPS)
    assert len(rates) == STEPS - 5 + 1
    assert rates[0] == max(rates) == 1.0
    assert rates[-2:] == pytest.approx((rate(STEPS - 1) / rate(5), rate(STEPS) / rate(5)))
    assert len(relative_rates(lambda _: 1.0, 0, 10**6)) == 1001
    assert relative_rates(lambda _: 0.0, 0, 4) == (1.0,) * 5


def test_the_carried_weights_of_a_run_follow_its_learning_rates() -> None:
    timeline = timeline_of(config(schedule="auto"), arguments(), SolveRequest(), LINEARS, scheduler(), 0)
    weights = timeline.carried(0, (0, 25, 38, 45), STEPS)
    assert sum(weights) == pytest.approx(1.0)
    assert weights[3] < 0.01 < 0.5 < weights[0]  # the rate has fallen by then
    assert timeline.schedule is not None
    assert (timeline.last, timeline.standing, timeline.timed) == (STEPS, 1.0, False)


def test_without_a_known_end_the_map_is_static_and_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert timeline_of(config(schedule="auto"), arguments(train_iters=None), SolveRequest(), LINEARS, None, 0) is None
    line = capsys.readouterr().out
    assert line.startswith(
        "snip: --snip-schedule auto: the end of training is unknown without --train-iters: every update"
    )
    assert line.endswith("give --train-iters for phases\n")
    assert timeline_of(config(), arguments(train_iters=None), SolveRequest(), LINEARS, None, 0) is None
    assert capsys.readouterr().out == ""
    with pytest.raises(SnipError, match="--snip-policy late-all needs an end of training: give --train-iters"):
        timeline_of(config(policy="late-all"), arguments(train_iters=None), SolveRequest(), LINEARS, None, 0)

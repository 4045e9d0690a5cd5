"""Figures of a step, one step later."""

import pytest
import torch

from snip_megatron.runtime.exchange import StepFigures, StepReport

pytestmark = pytest.mark.usefixtures("one_rank")


def test_figures_arrive_one_step_later() -> None:
    report = StepReport(torch.device("cpu"))
    loss = torch.tensor(2.5)
    assert report.exchange(7, loss, 0.25) is None
    loss.fill_(9.0)  # what was sent does not change any more
    assert report.exchange(8, torch.tensor([3.0]), float("nan")) == StepFigures(7, 2.5, 0.25)
    assert report.exchange(9, None, None) == StepFigures(8, 3.0, None, broken=True)
    assert report.drain() == StepFigures(9, None, None)
    assert report.drain() is None


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_is_no_figure_but_a_sign(number: float) -> None:
    report = StepReport(torch.device("cpu"))
    report.exchange(0, torch.tensor(number), 1.0)
    assert report.exchange(1, torch.tensor(1.0), number) == StepFigures(0, None, 1.0, broken=True)
    assert report.drain() == StepFigures(1, 1.0, None, broken=True)


def test_rank_zeros_figures_travel_with_the_loss_at_the_steps_that_have_some() -> None:
    news = [None, {"step_s": 0.5, "speedup": 1.25, "saved_h": -2.0}, {"step_s": 0.25}, None]
    report = StepReport(torch.device("cpu"), news=lambda: news.pop(0))
    report.exchange(0, torch.tensor(1.0), 1.0)
    result = [report.exchange(step, torch.tensor(1.0), 1.0) for step in (1, 2, 3)]
    accounts = [None if figures is None else figures.account for figures in result]
    assert accounts == [{}, {"step_s": 0.5, "speedup": 1.25, "saved_h": -2.0}, {"step_s": 0.25}]

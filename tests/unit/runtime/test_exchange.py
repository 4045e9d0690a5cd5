"""Figures of a step, one step later. On several ranks: tests/distributed/test_adoption.py."""

import pytest
import torch

from snip_megatron.runtime.exchange import StepFigures, StepReport

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_figure_that_is_not_finite_travels_as_a_flag(number: float) -> None:
    report = StepReport(torch.device("cpu"))
    loss = torch.tensor(number)
    assert report.exchange(0, loss, 1.0) is None
    loss.fill_(9.0)  # what was sent does not change any more
    assert report.exchange(1, torch.tensor(1.0), number) == StepFigures(0, None, 1.0, broken=True)
    assert report.drain() == StepFigures(1, 1.0, None, broken=True)
    assert report.drain() is None


def test_rank_zeros_figures_travel_with_the_loss_at_the_steps_that_have_some() -> None:
    news = [None, {"step_s": 0.5, "speedup": 1.25, "saved_h": -2.0}, {"step_s": 0.25}, None]
    report = StepReport(torch.device("cpu"), news=lambda: news.pop(0))
    report.exchange(0, torch.tensor(1.0), 1.0)
    result = [report.exchange(step, torch.tensor(1.0), 1.0) for step in (1, 2, 3)]
    accounts = [None if figures is None else figures.account for figures in result]
    assert accounts == [{}, {"step_s": 0.5, "speedup": 1.25, "saved_h": -2.0}, {"step_s": 0.25}]

"""Whether a GPU waits for its host: a stand-in of the GPU lags behind the launches, or does not."""

import pytest
import torch

from snip_megatron.megatron import graphs

STEPS = 12


def run(monkeypatch: pytest.MonkeyPatch, lag: float, microbatches: int) -> list[int]:
    """Train; launching a step takes a second, and the GPU ends ``lag`` seconds later. Returns the steps that wait."""
    now, launched, waits = 0.0, 0, list[int]()

    def launch(num_microbatches: int) -> str:
        nonlocal now, launched
        now, launched = now + 1.0, launched + 1
        return "loss"

    def synchronize() -> None:
        nonlocal now
        now += lag
        waits.append(launched)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(graphs.time, "perf_counter", lambda: now)
    wait = graphs.HostWait()
    for _ in range(STEPS):
        assert wait.timed(launch)(num_microbatches=microbatches) == "loss"
    return waits


@pytest.mark.parametrize(("lag", "microbatches", "waits"), [(0.001, 1, True), (0.1, 1, False), (0.01, 16, False)])
def test_a_gpu_without_a_lag_waits(
    lag: float, microbatches: int, waits: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, lag, microbatches) == [5, 6, 7]
    assert ("snip: the GPU waits for its host" in capsys.readouterr().out) == waits

"""A log that fails, beside a real SummaryWriter that is read back. tests/distributed have the figures of a training."""

import pytest

from snip_megatron.reporting.sinks import MAX_FAILURES, Sinks
from snip_megatron.runtime.config import SnipConfig
from tests.unit.sensitivity.synthetic import make_table

pytest.importorskip("tensorboard")
wandb = pytest.importorskip("wandb")


@pytest.fixture
def writer(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(log_dir=str(tmp_path)) as writer:
        yield writer


def read(writer):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer.flush()
    return EventAccumulator(writer.log_dir).Reload()


class Broken:
    attempts = 0

    def log(self, *_, **__):
        self.attempts += 1
        raise OSError("disk full")


def test_a_broken_log_is_reported_once_and_given_up_and_harms_no_other_sink(writer, capsys):
    broken = Broken()
    sinks = Sinks(wandb=broken, tensorboard=writer)
    for step in range(MAX_FAILURES + 2):
        sinks.metric(step, fp4_fraction=0.5)
    assert broken.attempts == MAX_FAILURES
    assert capsys.readouterr().err == "snip: wandb: disk full; training goes on without these figures\n"
    assert len(read(writer).Scalars("snip/fp4_fraction")) == MAX_FAILURES + 2


def test_a_job_with_nvdlfw_inspect_has_the_linears_in_its_own_logs(tmp_path):
    """The names are those of Transformer Engine's statistics: layer, tensor or metric, with underscores between."""
    logging = pytest.importorskip("nvdlfw_inspect.logging")
    assert not Sinks()._writes  # imported, and not started
    scalars = {}

    class Logger(logging.BaseLogger):
        def log_scalar(self, name, value, iteration, **_):
            scalars[name, iteration] = value

    logging.MetricLogger.add_logger(Logger())
    try:
        sinks, table = Sinks(), make_table()
        sinks.metric(6, fp4_fraction=0.5)
        sinks.statistics(7, table, SnipConfig(enabled=True, estimator="noise"))
    finally:
        logging.MetricLogger.enabled_loggers.clear()
    names = [f"{row.name}_snip_delta_{kind}" for kind in ("loss", "weight") for row in table.linears]
    assert list(scalars) == [(name, 7) for name in names]
    assert all(value > 0 for value in scalars.values())

"""The processes of Megatron's checkpoint writer and a signal to all processes of a step. Real processes."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async

from snip_megatron.megatron.compat import writer_processes


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Starts the writer's queue as a rank's first save does."""
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    monkeypatch.setattr(filesystem_async, "get_write_results_queue", filesystem_async.get_write_results_queue)
    monkeypatch.setattr(
        async_utils.PersistentAsyncCaller,
        "_get_process",
        classmethod(async_utils.PersistentAsyncCaller._get_process.__func__),  # type: ignore[attr-defined]
    )
    return lambda: filesystem_async.get_write_results_queue()


def installed() -> None:
    args = argparse.Namespace(exit_signal_handler=True, save="c", exit_signal=signal.SIGTERM)
    assert writer_processes.is_needed(args)
    assert writer_processes.install(args) == "processes of the checkpoint writer do not see SIGTERM"
    writer_processes.install(args)  # as an in-process restart does


def test_the_writers_queue_outlives_a_signal_to_all(queue: Callable[[], Any]) -> None:
    installed()
    held = queue()
    server = held._manager._process
    os.kill(server.pid, signal.SIGTERM)
    held.put("written")
    assert held.get(timeout=60) == "written"
    assert server.is_alive()
    held._manager.shutdown()
    assert server.exitcode == 0  # not killed: it ends when it is told to
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_without_the_set_the_queue_dies(queue: Callable[[], Any]) -> None:
    """What the set is for. Once a Megatron protects its queue itself, the set can go."""
    held = queue()
    os.kill(held._manager._process.pid, signal.SIGTERM)
    held._manager._process.join(timeout=60)
    with pytest.raises((BrokenPipeError, EOFError, ConnectionError)):
        held.put("written")


@pytest.mark.parametrize(("handler", "save"), [(False, "c"), (True, None)])
def test_not_without_a_save_on_a_signal(handler: bool, save: str | None) -> None:
    assert not writer_processes.is_needed(argparse.Namespace(exit_signal_handler=handler, save=save))

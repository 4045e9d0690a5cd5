"""Starts helper processes that a signal to all processes of a job step does not end.

SLURM's ``proctrack/linuxproc`` sends the SIGTERM of a preemption to every process of a step. A rank has a handler for
it and saves a checkpoint. A helper without a handler would die, and the rank would then fail in the middle of its save.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator


@contextlib.contextmanager
def blocked_in_children(signals: Iterable[signal.Signals] = (signal.SIGTERM,)) -> Iterator[None]:
    """Block ``signals`` in every process that this thread starts in the meantime, for the life of that process.

    A process inherits the signal mask of the thread that starts it. The mask also survives ``exec``, so that no moment
    remains in which the process has no protection. A signal to this process in the meantime is delivered afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

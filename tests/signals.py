"""Commands that a test stops by a signal."""

import signal
import sys
from collections.abc import Sequence


def heeding(number: signal.Signals, command: Sequence[str]) -> list[str]:
    """Return a command that becomes ``command`` and heeds a signal, also if the tests ignore it, as under nohup."""
    heeded = (
        f"import os, signal, sys; signal.signal({int(number)}, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-c", heeded, *command]

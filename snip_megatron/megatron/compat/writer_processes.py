"""``writer-processes``: keeps the processes of Megatron's checkpoint writer alive through the exit signal.

With ``--exit-signal-handler`` a rank saves a checkpoint on SIGTERM. Megatron's writer keeps a server process for its
results, and with ``--use-persistent-ckpt-worker`` a writing process. Both are started by ``spawn`` and have no handler.
If a scheduler sends SIGTERM to all processes of a step, they die, and the save fails with a broken pipe.
"""

import argparse
import functools
import importlib
import importlib.util
import signal
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any

from snip_megatron.runtime.sidecar.client import blocked_in_children

#: (module, class or None, function that starts a process), of Megatron and of nvidia-resiliency-ext.
_STARTERS = (
    ("megatron.core.dist_checkpointing.strategies.filesystem_async", None, "get_write_results_queue"),
    ("megatron.core.dist_checkpointing.strategies.async_utils", "PersistentAsyncCaller", "_get_process"),
    ("nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async", None, "get_write_results_queue"),
    ("nvidia_resiliency_ext.checkpointing.async_ckpt.core", "PersistentAsyncCaller", "_get_process"),
)


def is_needed(args: argparse.Namespace) -> bool:
    """Whether ranks save a checkpoint on a signal."""
    return bool(args.exit_signal_handler and args.save)


def install(args: argparse.Namespace) -> str:
    """Wrap the functions that start the writer's processes. Returns a description for the list printed at start.

    A second call in the same process does nothing.
    """
    signals = frozenset({signal.SIGTERM, getattr(args, "exit_signal", signal.SIGTERM)})
    for module, owner, name in _STARTERS:
        place = _find(module, owner)
        function = getattr(place, name, None)
        if function is None or hasattr(function, "snip_shielded"):
            continue
        if owner is None:
            setattr(place, name, _shielded(function, signals))
        else:  # a class method: getattr has bound it
            setattr(place, name, classmethod(_shielded(function.__func__, signals)))
    names = ", ".join(sorted(each.name for each in signals))
    return f"processes of the checkpoint writer do not see {names}"


def _find(module: str, owner: str | None) -> Any:
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return None
    try:
        found: Any = importlib.import_module(module)
    except ImportError:  # another version of the package
        return None
    return found if owner is None else getattr(found, owner, None)


def _shielded(function: Callable[..., Any], signals: frozenset[signal.Signals]) -> Callable[..., Any]:
    @functools.wraps(function)
    def start(*args: Any, **kwargs: Any) -> Any:
        # multiprocessing starts its tracker with the first process, and unblocks SIGTERM afterwards.
        resource_tracker.ensure_running()
        with blocked_in_children(signals):
            return function(*args, **kwargs)

    start.snip_shielded = True  # type: ignore[attr-defined]
    return start

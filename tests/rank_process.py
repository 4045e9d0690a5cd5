"""What processes share that are forked to be ranks: of tests on CPUs (warm_ranks) and on GPUs (forked_ranks)."""

import argparse
import atexit
import contextlib
import ctypes
import functools
import importlib
import multiprocessing
import os
import random
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.managers import SyncManager
from typing import Any, NoReturn


def free_port() -> int:
    """Return a port below those that the system gives to connections: one that is free there stays free."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def read_help_of_options_once() -> None:
    """Megatron builds its parser three times a run, and each time parses the source of its configurations for help."""
    from megatron.training import argument_utils
    from megatron.training.arguments import add_megatron_arguments

    factory = argument_utils.ArgumentGroupFactory
    read = functools.partial(factory._get_field_docstrings, object.__new__(factory))
    factory._get_field_docstrings = staticmethod(functools.cache(read))
    add_megatron_arguments(argparse.ArgumentParser())


def replace_target(target: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Call ``make(function)`` in place of the function that ``module:Class.name`` names."""
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    genuine = getattr(owner, name)
    setattr(owner, name, functools.wraps(genuine)(make(genuine)))


def run_as_rank(module: str, arguments: list[str], prepare: Callable[[], None]) -> NoReturn:
    """Call ``prepare`` and ``main()`` of ``module``, or the function that ``module:function`` names, and exit.

    ``prepare`` sets the folder, the output and the environment of the process.
    """
    code = 1
    try:
        prepare()
        sys.argv = [module, *arguments]
        if "--save" in arguments:
            _fork_the_writers_queue()
        name, _, function = module.partition(":")
        code = getattr(importlib.import_module(name), function or "main")() or 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _fork_the_writers_queue() -> None:
    """Megatron spawns a process for the results of its checkpoint writer, which imports torch and Megatron again.

    A fork has them. It comes first, so that the process holds no connection of the rank, and ends with a killed rank.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    manager = SyncManager(ctx=multiprocessing.get_context("fork"))
    manager.start(_end_with_the_parent)
    filesystem_async._results_queue = manager.Queue()


def _end_with_the_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)

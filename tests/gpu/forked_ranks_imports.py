"""What the process imports from which ranks are forked (forked_ranks.py)."""

import contextlib
import importlib

from warm_ranks import PRELOADED, _read_help_of_options_once

from snip_megatron.megatron.startup import prepare

prepare([], [])
with contextlib.suppress(Exception):  # not on this machine, or broken: a training says which
    import transformer_engine.pytorch  # noqa: F401
for name in PRELOADED:
    with contextlib.suppress(ImportError):  # optional ones, as plotly
        importlib.import_module(name)
_read_help_of_options_once()

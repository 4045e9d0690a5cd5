"""What the process imports from which ranks are forked (forked_ranks.py)."""

import argparse
import contextlib
import functools
import importlib

from snip_megatron.megatron.startup import prepare

prepare([], [])
for name in (
    "transformer_engine.pytorch", "snip_megatron.pretrain_gpt", "snip_megatron.megatron.entry",
    "snip_megatron.megatron.setup", "snip_megatron.runtime.sidecar", "megatron.core.datasets.helpers",
    "megatron.core.models.mimo", "megatron.core.tokenizers.text.models",
    "megatron.core.tokenizers.text.text_tokenizer", "plotly.graph_objects",
):  # fmt: skip
    with contextlib.suppress(Exception):  # not on this machine, or broken: a training says which
        importlib.import_module(name)

# Megatron builds its parser three times a run, and each time parses the source of its configurations for help.
from megatron.training import argument_utils  # noqa: E402
from megatron.training.arguments import add_megatron_arguments  # noqa: E402

_factory = argument_utils.ArgumentGroupFactory
_read = functools.partial(_factory._get_field_docstrings, object.__new__(_factory))
_factory._get_field_docstrings = staticmethod(functools.cache(_read))
add_megatron_arguments(argparse.ArgumentParser())

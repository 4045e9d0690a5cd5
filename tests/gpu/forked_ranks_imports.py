"""What the process imports from which ranks are forked (forked_ranks.py)."""

import contextlib
import importlib

from rank_process import read_help_of_options_once

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

read_help_of_options_once()

"""What the process imports from which ranks are forked (forked_ranks.py)."""

import contextlib
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch

_CARD = """
import json
import torch
card = torch.cuda.get_device_properties(0)
fields = {name: getattr(card, name) for name in dir(card) if not name.startswith("_")}
print(json.dumps({name: value for name, value in fields.items() if isinstance(value, int | float | str)}))
"""


@contextlib.contextmanager
def no_context_on_the_card() -> Iterator[None]:
    """Let another process ask what the card is: CUDA must not be initialised before a fork.

    Kernels of Megatron 0.20 (gated delta products) ask when they are imported. torch's compiler keeps the answer, and
    reads other fields of it in the forks.
    """
    if not torch.cuda.is_available():
        yield
        return
    printed = subprocess.run([sys.executable, "-c", _CARD], capture_output=True, text=True, check=True).stdout
    card = SimpleNamespace(**json.loads(printed.splitlines()[-1]))
    with mock.patch.multiple(
        torch.cuda,
        get_device_properties=lambda *_: card,
        get_device_name=lambda *_: card.name,
        get_device_capability=lambda *_: (card.major, card.minor),
    ):
        yield


with no_context_on_the_card():
    from rank_process import read_help_of_options_once

    from snip_megatron.megatron.startup import prepare

    prepare([], [])
    for module in (
        "transformer_engine.pytorch", "snip_megatron.pretrain_gpt", "snip_megatron.megatron.entry",
        "snip_megatron.megatron.setup", "snip_megatron.runtime.solving", "megatron.core.datasets.helpers",
        "megatron.core.models.mimo", "megatron.core.tokenizers.text.models",
        "megatron.core.tokenizers.text.text_tokenizer", "plotly.graph_objects",
    ):  # fmt: skip
        with contextlib.suppress(Exception):  # not on this machine, or broken: a training says which
            importlib.import_module(module)

    read_help_of_options_once()

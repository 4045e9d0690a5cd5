"""The training entry with another ``general_gemm`` of Transformer Engine: ``python -m blamed_te``.

``FAULT=dgrad`` loses rows of the dgrads of ``linear_fc2``, found by the shape of its weight. ``COUNTS=FILE`` writes how
many fprops had a weight of each shape, quantised and not.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch.module.linear as te_linear

from snip_megatron import pretrain_gpt

_run = te_linear.general_gemm


def broken(a: Any, b: Any, *positional: Any, **named: Any) -> Any:
    """Return what ``general_gemm`` does, without the last rows of a dgrad."""
    result = _run(a, b, *positional, **named)
    if named.get("layout") == "NN" and named.get("grad") and result[0].shape[-1] == int(os.environ["DEPTH"]):
        result[0].view(-1, result[0].shape[-1])[-16:] = 0
    return result


counts: Counter[str] = Counter()


def counted(weight: Any, *positional: Any, **named: Any) -> Any:
    """Return what ``general_gemm`` does, and count the fprops."""
    if not named.get("grad"):
        plain = type(weight) in {torch.Tensor, torch.nn.Parameter}
        counts[f"{'x'.join(map(str, weight.size()))} {'plain' if plain else 'quantised'}"] += 1
    return _run(weight, *positional, **named)


if __name__ == "__main__":
    if os.environ.get("FAULT") == "dgrad":
        te_linear.general_gemm = broken
    if "COUNTS" in os.environ:
        te_linear.general_gemm = counted
    code = pretrain_gpt.main()
    if "COUNTS" in os.environ:
        Path(os.environ["COUNTS"]).write_text(json.dumps(counts))
    sys.exit(code)

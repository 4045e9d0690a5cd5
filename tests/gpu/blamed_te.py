"""The training entry, in which one GEMM of Transformer Engine loses rows: ``python -m blamed_te`` with ``FAULT=dgrad``.

The fault is that of the first layer's ``linear_fc2``, found by the shape of its weight.
"""

import os
import sys
from typing import Any

import transformer_engine.pytorch.module.linear as te_linear

from snip_megatron import pretrain_gpt

_run = te_linear.general_gemm


def broken(a: Any, b: Any, *others: Any, **named: Any) -> Any:
    """Return what ``general_gemm`` does, without the last rows of a dgrad."""
    result = _run(a, b, *others, **named)
    if named.get("layout") == "NN" and named.get("grad") and result[0].shape[-1] == int(os.environ["DEPTH"]):
        result[0].view(-1, result[0].shape[-1])[-16:] = 0
    return result


if __name__ == "__main__":
    if os.environ.get("FAULT") == "dgrad":
        te_linear.general_gemm = broken
    sys.exit(pretrain_gpt.main())

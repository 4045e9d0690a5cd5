"""The training entry, recording losses and gradient norms bit for bit: ``python -m family_pretrain``, ``TRACE=FILE``.

``FILE``: ``losses`` and ``grad_norms``, each step from 1 -> float.hex().
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from snip_megatron.megatron.startup import prepare
from snip_megatron.pretrain_gpt import parse_snip_arguments


def main() -> None:
    startup = prepare(sys.argv[1:], parse_snip_arguments(sys.argv[1:]).no_compat)
    from snip_megatron.megatron import compat
    from snip_megatron.megatron.entry import run

    body: dict[str, dict[int, str]] = {"losses": {}, "grad_norms": {}}

    def wrap(train_step: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            result = train_step(*args, **kwargs)
            body["losses"][kwargs["iteration"] + 1] = float(result[0]["lm loss"]).hex()
            body["grad_norms"][kwargs["iteration"] + 1] = float(result[5]).hex()
            return result

        return step

    compat.wrap_train_step(wrap)
    try:
        run(startup)
    finally:
        Path(os.environ["TRACE"]).write_text(json.dumps(body))


if __name__ == "__main__":
    main()

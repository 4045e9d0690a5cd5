"""The training entry, recording every step bit for bit: ``python -m traced_pretrain`` with ``TRACE=<folder>``.

Each rank writes ``rank<k>.json``: ``losses`` and ``grad_norms`` (step from 1 -> float.hex(); losses only on the last
pipeline stage) and ``weights`` (SHA-256 of all parameters at the end).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from snip_megatron.config import SnipConfig
from snip_megatron.megatron.startup import prepare
from snip_megatron.pretrain_gpt import parse_snip_arguments


class Recorder:
    """Wraps Megatron's train_step."""

    def __init__(self) -> None:
        self.losses: dict[int, str] = {}
        self.grad_norms: dict[int, str] = {}
        self.model: list[torch.nn.Module] = []

    def wrap(self, train_step: Any) -> Any:
        def step(forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            self.model = model
            result = train_step(forward_step_func, data_iterator, model, *args, **kwargs)
            number = kwargs["iteration"] + 1
            if result[0]:
                self.losses[number] = float(result[0]["lm loss"]).hex()
            self.grad_norms[number] = float(result[5]).hex()
            return result

        return step

    def write(self, folder: Path) -> None:
        digest = hashlib.sha256()
        for chunk in self.model:
            for parameter in chunk.parameters():
                digest.update(parameter.detach().float().numpy().tobytes())
        body = {"losses": self.losses, "grad_norms": self.grad_norms, "weights": digest.hexdigest()}
        (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(body))


def read_traces(folder: Path) -> list[dict[str, Any]]:
    """What the ranks wrote, in order of rank; steps are ints."""
    traces = []
    for rank in range(len(list(folder.glob("rank*.json")))):
        body = json.loads((folder / f"rank{rank}.json").read_text())
        for name in ("losses", "grad_norms"):
            body[name] = {int(step): value for step, value in body[name].items()}
        traces.append(body)
    return traces


def main() -> None:
    config: SnipConfig = parse_snip_arguments(sys.argv[1:])
    startup = prepare(sys.argv[1:], config.no_compat)
    from snip_megatron.megatron import compat
    from snip_megatron.megatron.entry import run

    recorder = Recorder()
    compat.wrap_train_step(recorder.wrap)
    folder = Path(os.environ["TRACE"])
    folder.mkdir(parents=True, exist_ok=True)
    try:
        run(startup)
    finally:
        recorder.write(folder)


if __name__ == "__main__":
    main()

"""Run directories to write in, and to read."""

import json
from pathlib import Path

from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.runtime.run_directory import RunDirectory

CONFIG = {"budget": {"fp4": 0.75}, "policy": "snip", "update_interval": 4, "pins": []}
FC1 = "decoder.layers.0.mlp.linear_fc1"


def new_run(path: Path, config=CONFIG, *, overwrite=False, resume_step=None, **fields) -> RunDirectory:
    return RunDirectory(path, config, overwrite=overwrite, resume_step=resume_step, **fields)


def recorded_run(path: Path, steps: int = 10) -> None:
    with new_run(path) as run:
        for step in range(steps):
            run.metric(step, loss=5.0 - step, grad_norm=1.0, fp4_fraction=0.0)
            if step % 4 == 0:
                run.event(step, "adopt", version=step // 4)
                run.write("maps", step, PrecisionMap.uniform([FC1], Format.FP4, version=step // 4).to_json())


def content(path: Path) -> dict[Path, bytes]:
    """All files below a folder."""
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def strict_json(text: str):
    def refuse(token: str):
        raise AssertionError(f"{token} is not JSON")

    return json.loads(text, parse_constant=refuse)

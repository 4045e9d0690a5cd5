"""The training entry with faults: ``python -m faults.trainer`` with ``FAULTS=<folder>`` that holds ``plan.json``.

Each rank leaves ``trace<rank>.jsonl`` there: loss and gradient norm of each step as float.hex(), and the map's codes.
"""

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

from faults.injection import Rank, Record
from faults.kinds import KINDS
from faults.plan import Fault, window

BACKOFF_S = 0.2  # a training of seconds has none to wait for the first restart


def main() -> int:
    from snip_megatron.megatron.startup import prepare
    from snip_megatron.pretrain_gpt import main as train

    prepare(sys.argv[1:], [])
    folder = Path(os.environ["FAULTS"])
    rank = Rank(folder)
    faults = [Fault(**body) for body in json.loads((folder / "plan.json").read_text())]
    _trace(rank)
    _use_faulty_sidecar()
    _use_own_media_folder()
    for fault in faults:
        KINDS[fault.kind].install(rank, fault)
    _follow(rank, faults)
    return train()


def _follow(rank: Rank, faults: list[Fault]) -> None:
    """Tell the faults of this process's steps, before each of them."""
    from snip_megatron.runtime.controller import Controller

    genuine = Controller.before_step

    def before_step(controller: Any, step: int, *args: Any, **kwargs: Any) -> None:
        rank.controller, rank.step = controller, step
        if step in {window(fault.step)[-1] + 1 for fault in faults}:
            rank.settle()
        for fault in faults:
            if step in window(fault.step):
                KINDS[fault.kind].at_step(rank, fault, step)
        genuine(controller, step, *args, **kwargs)

    Controller.before_step = before_step  # type: ignore[method-assign]


def _use_faulty_sidecar() -> None:
    from snip_megatron.runtime import coordinator
    from snip_megatron.runtime.sidecar import SidecarClient

    coordinator.SidecarClient = functools.partial(  # type: ignore[misc,assignment]
        SidecarClient, solve="faults.builder:solve", restart_backoff_s=BACKOFF_S
    )


def _use_own_media_folder() -> None:
    """wandb's temporary folder is of the process that imported it: the first forked rank to end removes it for all."""
    if "wandb" in sys.modules:
        from wandb.sdk.data_types._private import MEDIA_TMP

        Path(MEDIA_TMP.name).mkdir(exist_ok=True)


def _trace(rank: Rank) -> None:
    from snip_megatron.runtime.controller import Controller

    trace = Record(rank.folder / f"trace{rank.number}.jsonl")
    genuine = Controller.after_step

    def after_step(controller: Any, step: int, loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        registry = controller._registry
        codes = registry.current.to_codes(registry.names).tobytes().hex()
        trace.add(
            step=step,
            loss=None if loss is None else float(loss).hex(),
            norm=None if grad_norm is None else float(grad_norm).hex(),
            map=codes,
        )
        genuine(controller, step, loss, grad_norm, *args, **kwargs)

    Controller.after_step = after_step  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())

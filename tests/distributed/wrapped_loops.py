"""The plain loop's example in one process on the whole batch, then data parallel in several ways on a share of it each.

Every rank writes what it found to ``<folder>/<rank>.json``: module of warm ranks, with the folder as argument.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from examples import plain_loop as example
from snip_megatron.numerics.products.hopper import HopperBackend
from snip_megatron.numerics.quantize import operands
from snip_megatron.plain import convert
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.warmup import agree_about_deepgemm

Wrap = Callable[[Any], Any]


def train(rank: int, ranks: int, before: Wrap, after: Wrap, **options: Any) -> dict[str, Any]:
    """Train four steps with an update before the third. ``before`` wraps the model first, ``after`` after convert()."""
    torch.manual_seed(3)
    model = before(example.Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    snip = convert(model, optimizer, first_update=2, update_interval=100, **options)
    model, losses = after(model), []
    for batch in example.batches(4):
        share = batch.chunk(ranks)[rank]

        def loss(share: torch.Tensor = share) -> torch.Tensor:
            logits = model(share[:, :-1])
            return nn.functional.cross_entropy(logits.flatten(0, 1), share[:, 1:].flatten())

        snip.step(loss)
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    table = snip.table
    assert table is not None
    return {
        "map": {key: fmt.value for key, fmt in snip.map.choices.items()},
        "tokens": table.tokens,
        "columns": {c: table.linear[c].tolist() for c in ("x2", "w2", "g2", "d2", "gw2")}
        | {c: table.boundary[c].tolist() for c in ("h2", "r2")}
        | {"c2": table.by_format["c2"].ravel().tolist(), "sinks": table.arrays["sink_drift2"].ravel().tolist()},
        "losses": losses,
    }


def sharded(model: Any) -> Any:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def main() -> None:
    def stays(model: Any) -> Any:
        return model

    def ddp(model: Any) -> Any:
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def joins(model: Any) -> Any:
        dist.init_process_group("gloo")
        return ddp(model)

    results: dict[str, Any] = {"alone": train(0, 1, stays, stays)}
    rank = int(os.environ["RANK"])
    results["ddp after"] = train(rank, 2, stays, joins)
    results["ddp before"] = train(rank, 2, ddp, stays)
    results["fully_shard"] = train(rank, 2, sharded, stays)
    try:
        train(rank, 2, stays, ddp, seed=rank)
    except SnipError as error:
        results["unlike"] = {"error": str(error), "exit_code": error.exit_code}
    backend = HopperBackend(operands, library=object(), deepgemm=object(), groups=object())  # type: ignore[arg-type]
    if rank == 1:
        backend.disable_deepgemm()
    agree_about_deepgemm(backend)
    results["library"] = backend.products
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

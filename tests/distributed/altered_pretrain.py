"""The training entry, altered as functions below say: ``ALTER=spike,…``. Its last line says whether groups are left.

Module of warm ranks, which have imported Megatron.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timings import RATES

from snip_megatron import pretrain_gpt
from snip_megatron.precision import DENSE_LAYER, Format


def couple() -> None:
    """Adam whose weight decay is part of the gradient."""
    from megatron.core.optimizer import OptimizerConfig

    check = OptimizerConfig.__post_init__

    def coupled(config: Any) -> None:
        config.decoupled_weight_decay = False
        check(config)

    OptimizerConfig.__post_init__ = coupled  # type: ignore[method-assign]


def freeze() -> None:
    """Parameters whose name holds a part of ``FROZEN`` (a,b,…) are not trained."""

    def frozen(name: str, parameter: torch.nn.Parameter) -> None:
        if any(part in name for part in os.environ["FROZEN"].split(",")):
            parameter.requires_grad_(False)

    _change_parameters(frozen)


def one_expert() -> None:
    """Weights drawn by name, and an expert's names and numbers those of the dense MLP in its place.

    So a decoder of mixtures of one expert is the dense decoder, down to the random signs of the drift and of
    stochastic rounding.
    """
    from snip_megatron.layers.context import LinearHandle

    def draw_by_name(name: str, parameter: torch.nn.Parameter) -> None:
        if parameter.dim() > 1:  # norms keep theirs
            seed = zlib.crc32(name.replace("mlp.experts.local_experts.0.", "mlp.").encode())
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.data.copy_(0.02 * drawn)

    def dense_index(handle: Any) -> int:
        kinds = len(DENSE_LAYER)
        return int(handle.id.layer * kinds + DENSE_LAYER.index(handle.id.path.replace(".experts.", ".")))

    LinearHandle.index = property(dense_index)  # type: ignore[assignment,method-assign]
    _change_parameters(draw_by_name)


def _change_parameters(change: Any) -> None:
    """Of the built model, before SNIP sees it."""
    from snip_megatron.megatron import setup

    hook = setup.SnipRun.pre_wrap_hook

    def changed(snip_run: Any, chunks: list[Any]) -> list[Any]:
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                change(name, parameter)
        return hook(snip_run, chunks)

    setup.SnipRun.pre_wrap_hook = changed  # type: ignore[method-assign]


def mask() -> None:
    """A loss mask that leaves out the first three quarters of every sequence, as of a prompt."""
    from snip_megatron.megatron import entry

    genuine = entry.loss_function

    def masked(loss_mask: torch.Tensor, output: torch.Tensor) -> Any:
        counted = torch.arange(loss_mask.shape[1]) >= 3 * loss_mask.shape[1] // 4
        return genuine(loss_mask * counted, output)

    entry.loss_function = masked


def spike() -> None:
    """A loss that is eight times too large in the steps of ``SPIKES=<first>,<beyond>`` (from 0)."""
    from megatron.training import get_args

    from snip_megatron.megatron import entry

    first, beyond = (int(step) for step in os.environ["SPIKES"].split(","))
    genuine = entry.loss_function

    def spiking(*args: Any) -> Any:
        loss, tokens, reported = genuine(*args)
        factor = 8.0 if first <= get_args().curr_iteration < beyond else 1.0
        return loss * factor, tokens, {name: v * v.new_tensor([factor, 1.0]) for name, v in reported.items()}

    entry.loss_function = spiking


def tight() -> None:
    """A rank whose device tells how much memory is free: ``TIGHT=<rank>,<bytes>,<bytes>,…``.

    That rank has so much at its first probe, its second and so on, and all others have plenty.
    """
    from snip_megatron.runtime.probing import memory

    rank, *free = (int(number) for number in os.environ["TIGHT"].split(","))
    memory.device_memory = lambda device: (free.pop(0) if dist.get_rank() == rank else 2.0**40, 2.0**24)


def replicas() -> None:
    """Each rank writes ``OUT/rank<k>.pt`` after every step: gradients by name of what tensor parallel ranks share."""
    from snip_megatron.megatron.setup import SnipRun

    around_step = SnipRun.around_step

    def around_step_and_write(self: SnipRun, train_step: Any, call: Any) -> Any:
        result = around_step(self, train_step, call)
        parameters = call.model[0].named_parameters()
        found = {name: p.main_grad for name, p in parameters if not getattr(p, "tensor_model_parallel", False)}
        torch.save(found, Path(os.environ["OUT"]) / f"rank{dist.get_rank()}.pt")
        return result

    SnipRun.around_step = around_step_and_write  # type: ignore[method-assign]


def rates() -> None:
    """GEMMs timed by a clock that knows the rate of every format."""
    from snip_megatron.megatron import own_times, setup, validate

    class RateClock:
        """Each call takes as long as its format's rate says."""

        device = torch.device("cpu")

        def seconds[Key: Hashable](self, calls: Mapping[Key, Any]) -> dict[Key, float]:
            return {key: 1e-3 / RATES[of(key)] if isinstance(key, tuple) and len(key) == 2 else 1e-5 for key in calls}

    def of(key: Any) -> Format:
        return next(part for part in key if isinstance(part, Format))

    own_times.clock_for = lambda device: RateClock()
    for module in (setup, validate):
        module.check_measurable = lambda config, backend: None


def main() -> int:
    for name in filter(None, os.environ.get("ALTER", "").split(",")):
        globals()[name]()
    code = pretrain_gpt.main()
    print("process groups left:", dist.is_initialized())
    return code


if __name__ == "__main__":
    sys.exit(main())

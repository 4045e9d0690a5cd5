"""Process groups of a model chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model

Group = torch.distributed.ProcessGroup


@dataclass(frozen=True)
class ProcessGroups:
    """The groups that SNIP reduces over.

    Attributes:
        tp, pp: tensor and pipeline parallel.
        mp: tensor × pipeline parallel, the ranks of one model copy.
        dp_cp: data × context parallel: ranks with equal weights and distinct tokens.
        intra_dp_cp: the part of it over which one distributed optimizer is sharded.
        expt_tp, expt_dp: tensor and data parallel group of experts' weights; None where the host names none.
        tp_ep_pp: one model copy including experts; likewise.
    """

    tp: Group
    pp: Group
    mp: Group
    dp_cp: Group
    intra_dp_cp: Group
    expt_tp: Group | None
    expt_dp: Group | None
    tp_ep_pp: Group | None


def process_groups(model_chunk: torch.nn.Module) -> ProcessGroups:
    """The groups of ``model_chunk`` (wrapped or not), from its own collection, else from Megatron's globals."""
    own = get_attr_wrapped_model(model_chunk, "pg_collection")
    collection: Any = own if own is not None else ProcessGroupCollection.use_mpu_process_groups()

    def of(name: str, default: Any = None) -> Any:
        group = getattr(collection, name, None)
        return default() if group is None and default is not None else group

    dp_cp = of("dp_cp", lambda: parallel_state.get_data_parallel_group(with_context_parallel=True))
    return ProcessGroups(
        tp=of("tp"),
        pp=of("pp"),
        mp=of("mp", parallel_state.get_model_parallel_group),
        dp_cp=dp_cp,
        intra_dp_cp=of("intra_dp_cp", lambda: dp_cp),
        expt_tp=of("expt_tp"),
        expt_dp=of("expt_dp"),
        tp_ep_pp=of("tp_ep_pp"),
    )

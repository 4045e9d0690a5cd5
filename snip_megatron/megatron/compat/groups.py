"""Process groups of a model chunk."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model

from snip_megatron.megatron.compat.versions import check_names
from snip_megatron.sensitivity.reduction import ProbeGroups

check_names(LanguageModule.__init__, "embd_group")  # ranks that hold the embedding's weight or the tied output's


def process_groups(model_chunk: torch.nn.Module) -> ProbeGroups:
    """Return the groups of ``model_chunk``, wrapped or not, over which statistics are reduced.

    They are taken from the chunk's own ``pg_collection``, or from Megatron's global state if it has none. Data parallel
    ranks are those with equal weights and distinct tokens, of context parallelism too.
    """
    own = get_attr_wrapped_model(model_chunk, "pg_collection")
    collection: Any = own if own is not None else ProcessGroupCollection.use_mpu_process_groups()
    dp_cp = getattr(collection, "dp_cp", None)
    expt_tp, expt_dp = (getattr(collection, name, None) for name in ("expt_tp", "expt_dp"))
    return ProbeGroups(
        tp=collection.tp,
        dp=parallel_state.get_data_parallel_group(with_context_parallel=True) if dp_cp is None else dp_cp,
        experts=None if expt_tp is None or expt_dp is None else ProbeGroups(tp=expt_tp, dp=expt_dp),
    )


def optimizer_instance(model_chunk: torch.nn.Module) -> int:
    """Return the number of this rank's distributed optimizer. Those of other instances hold the same state."""
    own = get_attr_wrapped_model(model_chunk, "pg_collection")
    group = getattr(own, "inter_dist_opt", None)
    if group is None:
        group = parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False)
    return 0 if group is None else int(group.rank())

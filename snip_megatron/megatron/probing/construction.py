"""Builds the probes of a run from Megatron's arguments and process groups."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from snip_megatron.config import SnipConfig
from snip_megatron.layers import LinearRegistry
from snip_megatron.megatron import compat
from snip_megatron.megatron.probing.probes import LoopShape, ProbeRunner
from snip_megatron.sensitivity.policies import needs_forward_noise
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.statistics.reduction import ProbeGroups


def make_probes(
    registry: LinearRegistry,
    config: SnipConfig,
    args: argparse.Namespace,
    groups: ProbeGroups,
    model: Sequence[torch.nn.Module],
    request: SolveRequest,
) -> ProbeRunner:
    """Return the probes that the policy and the estimator of ``request`` need. ``args`` are Megatron's."""
    shape = LoopShape(
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        padded_vocab_size=args.padded_vocab_size,
        virtual_stages=args.virtual_pipeline_model_parallel_size,
        optimizer_sharded=optimizer_sharded(args),
        context_parallel=args.context_parallel_size,
    )
    return ProbeRunner(
        registry,
        config,
        shape,
        groups,
        model,
        with_drift=needs_forward_noise(request),
    )


def optimizer_sharded(args: argparse.Namespace) -> bool:
    """Return whether a rank holds a part of the optimizer's state only."""
    return bool(args.use_distributed_optimizer) or bool(getattr(args, "use_layer_wise_distributed_optimizer", False))


def probe_groups(groups: compat.ProcessGroups) -> ProbeGroups:
    """Return the process groups over which statistics are reduced. Those of experts are None without experts."""
    experts = None
    if groups.expt_tp is not None and groups.expt_dp is not None:
        experts = ProbeGroups(tp=groups.expt_tp, dp=groups.expt_dp)
    return ProbeGroups(tp=groups.tp, dp=groups.dp_cp, experts=experts)

"""Chooses the class that holds the CUDA graphs of an implementation of Megatron."""

from __future__ import annotations

from snip_megatron.megatron.compat.recapture import FullIterationGraphs, Graphs, LocalGraphs
from snip_megatron.megatron.compat.te_graphs import TransformerEngineGraphs


def graphs_of(implementation: str) -> Graphs:
    """Return the graphs of an implementation, whose captures are timed from now on.

    This must be called before the model is built.

    Args:
        implementation: one of :data:`snip_megatron.megatron.compat.graphs.IMPLEMENTATIONS`.
    """
    if implementation == "local":
        return LocalGraphs()
    return TransformerEngineGraphs() if implementation == "transformer_engine" else FullIterationGraphs()

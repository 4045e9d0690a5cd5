"""Sizes that a probe works with."""

from __future__ import annotations

from snip_megatron.megatron.probing.probe_call import LoopShape


def test_context_parallel_peers_share_the_tokens_of_their_sequences() -> None:
    """Two microbatches of 4 sequences of 128 tokens on each of three copies, cut among four ranks or not."""
    whole = LoopShape(128, 4, 1000, None, optimizer_sharded=False)
    shared = LoopShape(128, 4, 1000, None, optimizer_sharded=False, context_parallel=4)
    assert whole.tokens(2, data_ranks=3) == shared.tokens(2, data_ranks=12) == 2 * 3 * 4 * 128

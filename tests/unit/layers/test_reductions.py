"""What a reduction of gradients keeps between steps, and in which shape kernels get a bucket.

tests/distributed/test_gradient_reduction.py has the bits of the sums.
"""

from __future__ import annotations

import torch

from snip_megatron.layers.reductions import ErrorFeedback


def test_a_reset_clears_the_memory_that_a_cuda_graph_reads() -> None:
    """A captured step adds what lies at the address that it was captured with."""
    feedback, whole = ErrorFeedback(), torch.ones(256)
    lost = feedback.of(whole, whole.view(2, 128))
    assert lost.dtype is torch.bfloat16
    assert lost.shape == (2, 128)
    lost.fill_(3.0)
    feedback.reset()
    assert not lost.any()
    assert feedback.of(whole, whole.view(2, 128)) is lost


def test_a_model_that_is_built_anew_has_lost_nothing() -> None:
    """Its buckets may lie where those of the model before lay."""
    feedback, whole = ErrorFeedback(), torch.ones(256)
    lost = feedback.of(whole, whole.view(2, 128))
    lost.fill_(3.0)
    feedback.forget()
    anew = feedback.of(whole, whole.view(2, 128))
    assert anew is not lost
    assert not anew.any()

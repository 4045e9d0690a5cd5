"""What a rank is told about its device's memory."""

from __future__ import annotations

import pytest
import torch

from snip_megatron.runtime.probing.memory import device_memory

SIZE = 2**28


def test_memory_that_a_rank_has() -> None:
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = device_memory(device)
    held = torch.empty(SIZE, dtype=torch.uint8, device=device)
    during = device_memory(device)
    del held
    after = device_memory(device)
    assert before is not None
    assert during is not None
    assert after is not None
    assert before[0] - during[0] == pytest.approx(SIZE, rel=0.1)
    # Now it belongs to torch's allocator: no longer free on the device, and yet available.
    assert after[0] == pytest.approx(before[0], abs=0.1 * SIZE)
    assert during[1] == pytest.approx(0.0, abs=0.1 * SIZE)
    assert after[1] == pytest.approx(SIZE, rel=0.1)


def test_memory_of_graphs_is_not_free() -> None:
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    before = device_memory(device)
    graph, source = torch.cuda.CUDAGraph(), torch.zeros(SIZE // 4, device=device)
    with torch.cuda.graph(graph):
        temporary = source + 1.0
        source.copy_(temporary)
    del temporary
    after = device_memory(device)
    assert before is not None
    assert after is not None
    assert before[0] - after[0] >= 1.9 * SIZE  # the source, and what the graph writes
    graph.replay()

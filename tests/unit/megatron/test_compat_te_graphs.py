"""Transformer Engine's CUDA graphs, as far as they can be seen without a GPU; the graphs themselves: ``tests/gpu``."""

import torch

from snip_megatron.megatron.compat.te_graphs import layers_of


def test_layers_of_changed_linears() -> None:
    layers = [torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Sequential(torch.nn.Linear(1, 1))) for _ in range(4)]
    nested = layers[3][1][0]
    assert layers_of(layers, [nested, layers[1][0], layers[1][1][0]]) == [layers[1], layers[3]]
    assert layers_of(layers, []) is None
    assert layers_of(layers, [layers[0][0], torch.nn.Linear(1, 1)]) is None, "a linear in no captured layer"

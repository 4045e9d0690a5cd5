"""The reference recorder: identities that its columns must satisfy, since others are compared with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from snip_megatron.sensitivity.divergence import dgrad_error2
from snip_megatron.statistics.table import StatisticsTable

from .reference_recorder import probe, square
from .small_llama import Trained, normalised, quantise

pytestmark = pytest.mark.xdist_group("sensitivity-truth")


def test_the_stream_adds_up_to_the_parameters_gradients(trained: Trained, probe_batch: tuple[Tensor, Tensor]) -> None:
    base = probe(trained, *probe_batch)
    embedding = torch.zeros_like(base.grads["embedding.weight"])
    embedding.index_add_(0, probe_batch[0].flatten(), base.r[0])
    torch.testing.assert_close(embedding, base.grads["embedding.weight"], rtol=1e-4, atol=1e-8)
    final = (base.final_gradient * normalised(base.h[-1])).sum(0)
    torch.testing.assert_close(final, base.grads["final_layernorm.weight"], rtol=1e-4, atol=1e-7)
    name = "decoder.layers.1.mlp.linear_fc1"
    torch.testing.assert_close(base.g[name].t() @ base.x[name], base.grads["blocks.1.fc1.weight"], rtol=1e-4, atol=1e-8)
    below = (base.g[name] @ trained.model.linears()[name].weight.detach()) * normalised(base.h[3])
    torch.testing.assert_close(below.sum(0), base.grads["blocks.1.pre_mlp_layernorm.weight"], rtol=1e-4, atol=1e-7)


def test_norm_formulas_agree_with_exact_errors(table: StatisticsTable, trained: Trained, probe_batch) -> None:
    """docs/how-it-works.md, weight divergence: medians .93–1.00 of the exact errors, each GEMM with its own δ."""
    fp4 = table.formats.index("fp4")
    k = np.array([row.k for row in table.linears])
    f, one = {c: v[:, fp4] for c, v in table.by_format.items()}, table.linear
    fprop = np.sqrt((f["dx_row2"] * one["w2"] + one["x2"] * f["dw2"]) / k / f["e2"])
    assert 0.85 <= np.median(fprop) <= 1.1
    wgrad = (f["dg_col2"] * one["x2"] + one["g2"] * f["dx_col2"]) / table.tokens
    np.testing.assert_allclose(f["wsigma2"], wgrad, rtol=1e-4)  # probe = step here
    base = probe(trained, *probe_batch)
    exact = []
    for name, linear in trained.model.linears().items():
        g, w = base.g[name], linear.weight.detach()
        exact.append(square(quantise(g, "fp4", "rows", 5) @ quantise(w, "fp4", "block") - g @ w))
    assert 0.85 <= np.median(np.sqrt(dgrad_error2(table, "fp4") / np.array(exact))) <= 1.1


def test_the_model_has_learnt(trained: Trained) -> None:
    """Sensitivities of an untrained model would say nothing."""
    assert trained.losses[-1] < 0.5 * trained.losses[0]

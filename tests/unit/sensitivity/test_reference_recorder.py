"""The reference recorder: identities that its columns must satisfy, since others are compared with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from snip_megatron.sensitivity.divergence import dgrad_error2
from snip_megatron.statistics.table import RHO_GRID, StatisticsTable

from .reference_recorder import probe, record, square
from .small_llama import BLOCKS, Trained, normalised, quantise

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


def test_every_column_is_finite_and_in_use(table: StatisticsTable) -> None:
    assert table.non_finite() == []
    for name, array in table.arrays().items():
        if name == "linear.gv2":  # not of one microbatch
            continue
        free = array[:-1] if name in ("boundary.branch_h2", "boundary.branch_r2") else array
        assert np.all(free > 0.0), name
    assert [row.boundary for row in table.sinks] == [0, *range(2 * BLOCKS + 1)]


def test_noise_passes_start_at_three_percent(table: StatisticsTable) -> None:
    b = table.boundary
    assert b["fh2"][0] / b["h2"][0] == pytest.approx(0.03**2, rel=0.02)
    top = b["br2"][-1] / b["r2"][-1]
    assert top == pytest.approx(0.03**2, rel=0.02)


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


def test_a_longer_step_has_less_noise(trained: Trained, probe_batch: tuple[Tensor, Tensor], table) -> None:
    quarter = record(trained, *probe_batch, steps_share=0.25)
    assert quarter.tokens_per_step == 4 * quarter.tokens
    np.testing.assert_allclose(quarter.by_format["wsigma2"], table.by_format["wsigma2"] / 4, rtol=1e-4)
    np.testing.assert_allclose(quarter.linear["s2"], table.linear["s2"], rtol=1e-4)  # of the probe
    # Where AdamW is linear in g, half the noise moves the weights half as far.
    small = RHO_GRID < 1e-2
    ratio = np.sqrt(quarter.drift2[:, small] / table.drift2[:, small])
    assert 0.4 <= np.median(ratio) <= 0.6


def test_the_model_has_learnt(trained: Trained) -> None:
    """Sensitivities of an untrained model would say nothing."""
    assert trained.losses[-1] < 0.5 * trained.losses[0]

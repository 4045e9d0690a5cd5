"""The estimator's ranking of options against the brute-force truth, with bounds that how-it-works.md's trap fails."""

from __future__ import annotations

import numpy as np
import pytest

from snip_megatron.precision import Gemm
from snip_megatron.sensitivity.divergence import dgrad_error2, second_order, update_error, weight_divergence
from snip_megatron.statistics.table import StatisticsTable

from .brute_force import from_norms, spearman
from .conftest import Truth

pytestmark = pytest.mark.xdist_group("sensitivity-truth")  # the truth is computed once

# Spearman to the truth that the recipe must reach; eight runs gave .91–.98, .84–.96, .93–.98 and .96–.99 (README). A
# ninth, with GEMMs that add in another order (MKL_CBWR=COMPATIBLE), trained another tiny model and gave .797 for the 16
# options of fprop. Their bound is the target of `snip validate-proxy`.
BOUNDS = {None: 0.85, Gemm.FPROP: 0.75, Gemm.DGRAD: 0.88, Gemm.WGRAD: 0.92}


def own_linear_only(table: StatisticsTable) -> np.ndarray:
    """The trap: each option's error moves the weights of its own linear, and no other. [linears, 3]."""
    fp4 = table.formats.index("fp4")
    fprop = np.sqrt(table.by_format["e2"][:, fp4] / table.linear["y2"])
    dgrad = np.sqrt(dgrad_error2(table, "fp4") / table.linear["d2"])
    relative = np.stack([np.diag(fprop), np.diag(dgrad)])
    scores = [update_error(table.drift2, table.linear["w2"], rho).sum(axis=1) for rho in relative]
    return np.stack([*scores, weight_divergence(table, ("fp4",))[:, 2, 0]], axis=1)


def relative_errors(table: StatisticsTable) -> np.ndarray:
    """The trap without an optimizer: the relative error of each GEMM's output. [linears, 3]."""
    fp4 = table.formats.index("fp4")
    columns = table.by_format
    wgrad = columns["dg_col2"][:, fp4] / table.linear["g2"] + columns["dx_col2"][:, fp4] / table.linear["x2"]
    fprop = columns["e2"][:, fp4] / table.linear["y2"]
    return np.sqrt(np.stack([fprop, dgrad_error2(table, "fp4") / table.linear["d2"], wgrad], axis=1))


def correlation(scores: np.ndarray, truth: np.ndarray, gemm: Gemm | None) -> float:
    """Spearman over all options, or over those of one GEMM."""
    columns = slice(None) if gemm is None else list(Gemm).index(gemm)
    return spearman(scores[:, columns], truth[:, columns])


@pytest.mark.parametrize("gemm", BOUNDS)
def test_weight_divergence_ranks_options_like_the_truth(
    table: StatisticsTable, truth: Truth, gemm: Gemm | None
) -> None:
    assert correlation(weight_divergence(table, ("fp4",))[:, :, 0], truth.drift, gemm) >= BOUNDS[gemm]


def test_backward_noise_reproduces_the_papers_pass(table: StatisticsTable, truth: Truth) -> None:
    scores = weight_divergence(table, ("fp4",), backward_noise=True)[:, :, 0]
    assert correlation(scores, truth.drift, Gemm.DGRAD) >= 0.85
    assert correlation(scores, truth.drift, None) >= BOUNDS[None]


@pytest.mark.parametrize("trap", [own_linear_only, relative_errors])
@pytest.mark.parametrize("gemm", [None, Gemm.FPROP, Gemm.DGRAD])
def test_without_cross_layer_gains_the_bounds_fail(table: StatisticsTable, truth: Truth, trap, gemm) -> None:
    assert correlation(trap(table), truth.drift, gemm) < BOUNDS[gemm] - 0.1


def test_drift_has_the_size_of_the_truth(table: StatisticsTable, truth: Truth) -> None:
    ratio = np.median(weight_divergence(table, ("fp4",))[:, :, 0] / truth.drift, axis=0)
    for gemm, low, high in ((0, 0.4, 1.5), (1, 0.7, 1.6), (2, 0.85, 1.15)):
        assert low <= ratio[gemm] <= high


def test_loss_divergence_ranks_and_sizes_like_the_truth(table: StatisticsTable, truth: Truth) -> None:
    exact, norms = (f(table, ("fp4",))[:, 0, 0] for f in (second_order, from_norms))
    assert spearman(exact, truth.loss) >= 0.85
    assert spearman(norms, truth.loss) >= 0.80
    assert 0.55 <= exact.sum() / truth.loss.sum() <= 1.3
    own = np.sqrt(table.by_format["e2"][:, table.formats.index("fp4")] / table.linear["y2"])
    assert spearman(own, truth.loss) < 0.6

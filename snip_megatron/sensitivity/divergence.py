"""The divergences of every option: the effect on the loss of its step, and on the optimizer's next update.

docs/how-it-works.md derives them. Only fprop has a loss divergence ΔL, because dgrad and wgrad do not change the loss
of their step. The weight divergence ΔW is summed over all linears, since an option changes the gradients of others too.

ρ and ξ are errors *relative* to a linear's gradient noise, ‖δ∇W‖²/‖s‖², where ‖s‖² is the sum of squares of the
per-token gradients. Both sums are over independent tokens, so ρ of a probe equals ρ of a step. √(microbatches of a
step) enters only once, in the s that ``drift2`` was tabulated with.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from snip_megatron.precision import Format, Gemm, Role
from snip_megatron.precision.errors import SnipError
from snip_megatron.sensitivity.table import RHO_GRID, StatisticsTable

FloatArray = NDArray[np.float64]

FPROP, DGRAD, WGRAD = (list(Gemm).index(g) for g in (Gemm.FPROP, Gemm.DGRAD, Gemm.WGRAD))


def format_column(table: StatisticsTable, column: str, formats: Sequence[str]) -> FloatArray:
    """Return a per-format column, float64 [linears, len(formats)]. See :func:`of_formats`."""
    return of_formats(table, table.by_format[column], formats)


def of_formats[T: np.generic](table: StatisticsTable, values: NDArray[T], formats: Sequence[str]) -> NDArray[T]:
    """Select ``formats`` from the last axis; bf16 has zeros. Raises SnipError if the table lacks one of them."""
    missing = [f for f in formats if f not in table.formats and f != Format.BF16.value]
    if missing:
        raise SnipError(
            f"the statistics of step {table.step} hold no {missing[0]} (only {', '.join(table.formats)});"
            " record them with the same candidate formats"
        )
    zeros = np.zeros(values.shape[:-1], dtype=values.dtype)
    return np.stack([values[..., table.formats.index(f)] if f in table.formats else zeros for f in formats], axis=-1)


def second_order(table: StatisticsTable, formats: Sequence[str]) -> FloatArray:
    """Return ΔL₂ = (T/2)·Σ_t (G_t·E_t)² of every option, in nats, float64 [linears, 3, formats] (how-it-works.md, loss
    divergence).

    ΔL₂ is additive over options and independent of T: it is the empirical Fisher estimate for the mean token loss.
    """
    scores = np.zeros((len(table.linears), len(Gemm), len(formats)))
    scores[:, FPROP] = 0.5 * table.tokens * format_column(table, "c2", formats)
    return scores


# -- weight divergence -------------------------------------------------------------------------------------------------
EMBEDDING = "embedding"  # prefix of the names of embeddings among the sinks. The other sinks are norms

_TINY = 1e-300


Propagation = tuple[FloatArray, FloatArray]
"""Relative gradient errors √(ρ² + ξ²) that an option, the GEMM of one linear in a format, causes elsewhere: float64
[options, linears] and [options, sinks]."""


def _places(table: StatisticsTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sub-block of every linear, and the place of its role in the sub-block.

    A sub-block is also the index of the boundary at its input. Place 0 reads the residual stream, place 2 writes it.
    """
    roles = list(Role)
    sub_blocks = np.array([row.sub_block for row in table.linears], dtype=np.int64)
    return sub_blocks, np.array([roles.index(row.role) for row in table.linears], dtype=np.int64)


def _sink_boundaries(table: StatisticsTable) -> NDArray[np.int64]:
    return np.array([row.boundary for row in table.sinks], dtype=np.int64)


def _ratio(numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    """Return sqrt(numerator / denominator), and 0 where the denominator is 0."""
    safe = np.where(denominator > 0.0, denominator, 1.0)
    root: FloatArray = np.sqrt(np.where(denominator > 0.0, numerator / safe, 0.0))
    return root


def fprop_propagation(table: StatisticsTable, fmt: str) -> Propagation:
    """Return where the error of an fprop in ``fmt`` goes (recipe, steps 2 and 3).

    Gradients change everywhere, through the loss; activations change in later sub-blocks only. Inside its own sub-block
    ‖E‖/‖Y‖ reaches the X of the linears after it and, through the nonlinearity, its own G: gate and up are one fc1, and
    the error of each part is in the gradient of the other. Raises SnipError if the table lacks the forward-noise pass.
    """
    sub, role = _places(table)
    c2 = format_column(table, "c2", (fmt,))[:, 0]
    calibration = table.boundary["cn2"][sub + 1]
    if bool(np.any((calibration <= 0.0) & (c2 > 0.0))):
        raise SnipError(f"the statistics of step {table.step} lack the forward-noise pass; use the estimator 'fisher'")
    k = _ratio(c2, calibration)[:, None]
    local = _ratio(format_column(table, "e2", (fmt,))[:, 0], table.linear["y2"])[:, None]
    gradient = k * _ratio(table.linear["fg2"], table.linear["gs2"])[None, :]
    activation = k * _ratio(table.linear["fx2"], table.linear["xs2"])[None, :] * (sub[None, :] > sub[:, None])
    local = local * ((sub[None, :] == sub[:, None]) & (role[None, :] >= role[:, None]) & (role[:, None] < 2))
    residual = _ratio(table.boundary["fr2"], table.boundary["r2"])
    return np.sqrt(gradient**2 + activation**2 + local**2), k * residual[_sink_boundaries(table)][None, :]


def dgrad_error2(table: StatisticsTable, fmt: str) -> FloatArray:
    """Return ‖E_D‖² ≈ (‖δG‖²‖W‖² + ‖G‖²‖δW‖²)/N of every linear's dgrad, float64 [linears] (docs/how-it-works.md).

    For experts, a sum of products is approximated by the product of the sums divided by the number of experts, which
    assumes that their weights are of about one size.
    """
    dg2, dw2 = (format_column(table, c, (fmt,))[:, 0] for c in ("dg_row2", "dw2"))
    count = np.array([row.n * row.experts for row in table.linears], dtype=np.float64)
    error: FloatArray = (dg2 * table.linear["w2"] + table.linear["g2"] * dw2) / count
    return error


def _exits(table: StatisticsTable) -> NDArray[np.bool_]:
    """Return through which linears the gradient of each linear's input leaves its sub-block, bool [linears, linears].

    These linears read the residual stream there. A linear reaches those of its module, and among them those whose names
    are equal up to ``_up`` or ``_down``. If its module reads no stream, it reaches all.
    """
    sub, role = _places(table)
    reads: NDArray[np.bool_] = (sub[None, :] == sub[:, None]) & (role[None, :] == 0)
    paths = [row.id.path.rpartition(".") for row in table.linears]
    modules = np.array([module for module, _, _ in paths])
    stems = np.array([f"{module}.{last.split('_up')[0].split('_down')[0]}" for module, _, last in paths])
    for names in (modules, stems):
        narrow = reads & (names[None, :] == names[:, None])
        reads = np.where(narrow.any(axis=1, keepdims=True), narrow, reads)
    return reads


def dgrad_propagation(table: StatisticsTable, fmt: str) -> Propagation:
    """Return where the error of a dgrad in ``fmt`` goes (recipe, step 4).

    It travels down unchanged, to every earlier sub-block and to the sinks below. Inside its own sub-block the error is
    undiluted for the G of the linears before it. The paper measures the gain from a sub-block to a linear by a pass
    with noise in the gradient. Taking it for 1 ranks options as well or better: ``benchmarks/results/quality/proxy_*``.
    """
    sub, role = _places(table)
    sink, at_option = _sink_boundaries(table), sub[:, None]
    # In the backward, a norm follows the linears of the sub-block above its boundary. The embedding is at boundary 0.
    is_norm = np.array([not row.name.startswith(EMBEDDING) for row in table.sinks], dtype=bool)
    norm_at_option = (sink[None, :] == at_option) & is_norm
    local = _ratio(dgrad_error2(table, fmt), table.linear["d2"])[:, None]
    exits, d2 = _exits(table), table.linear["d2"]
    all_exits = (sub[None, :] == at_option) & (role[None, :] == 0)
    beside = _ratio(exits @ d2, all_exits @ d2)[:, None]
    share = _ratio(table.boundary["branch_r2"], table.boundary["r2"])[sub][:, None]
    q = local * beside * share
    shared = exits.astype(np.float32) @ exits.T.astype(np.float32) > 0.0
    before = shared & (role[None, :] < role[:, None])
    to_linear = sub[None, :] < at_option
    to_sink = (sink[None, :] <= at_option) & ~norm_at_option
    return q * to_linear + local * before, q * to_sink + local * beside * norm_at_option


def update_error(drift2: FloatArray, w2: FloatArray, rho: FloatArray) -> FloatArray:
    """Return F_j(ρ) = ‖u(g + ρ·s∘z) − u(g)‖/‖W_j‖ by log-log interpolation of the table (recipe, step 6).

    ``drift2`` [owners, grid] is the squared update error, ``w2`` [owners] ‖W‖², and ``rho`` [options, owners] has the
    shape of the result.

    F is linear in ρ below RHO_GRID, and constant above. A parameter of norm 0 has no relative update error and counts
    as 0.
    """
    log_grid = np.log(RHO_GRID)
    log_error = 0.5 * np.log(np.maximum(drift2, _TINY))
    log_rho = np.log(np.maximum(rho, _TINY))
    position = np.clip(np.searchsorted(log_grid, log_rho, side="right") - 1, 0, len(log_grid) - 2)
    owner = np.broadcast_to(np.arange(rho.shape[1])[None, :], rho.shape)
    low, high = log_error[owner, position], log_error[owner, position + 1]
    part = np.clip((log_rho - log_grid[position]) / (log_grid[position + 1] - log_grid[position]), 0.0, 1.0)
    value = np.exp(low + part * (high - low)) * np.minimum(rho / RHO_GRID[0], 1.0)
    moved = (w2 > 0.0) & np.any(drift2 > 0.0, axis=1)
    result: FloatArray = np.where(moved[None, :], value / np.sqrt(np.where(w2 > 0.0, w2, 1.0))[None, :], 0.0)
    return result


def _total_update_error(table: StatisticsTable, reached: Propagation) -> FloatArray:
    linears = update_error(table.arrays["drift2"], table.linear["w2"], reached[0])
    sinks = update_error(table.arrays["sink_drift2"], table.arrays["sink_w2"], reached[1])
    total: FloatArray = linears.sum(axis=1) + sinks.sum(axis=1)
    return total


def weight_divergence(table: StatisticsTable, formats: Sequence[str]) -> FloatArray:
    """Return ΔW = Σ_j F_j(√(ρ_j² + ξ_j²)) over all linears and sinks, of every option, float64 [linears, 3, formats].

    ΔW is a sum of relative changes of the optimizer's update and has no unit. wgrad changes its own linear only
    (recipe, step 5). Raises SnipError if the table lacks a format, the forward-noise pass or the optimizer's update
    error.
    """
    if not np.any(
        (table.arrays["drift2"] if any(row.trained for row in table.linears) else table.arrays["sink_drift2"]) > 0.0
    ):
        raise SnipError(
            f"the statistics of step {table.step} hold no drift of the optimizer's update (no moments before the"
            " first step); use the estimator 'fisher' or a later first update"
        )
    scores = np.zeros((len(table.linears), len(Gemm), len(formats)))
    for column, fmt in enumerate(formats):
        scores[:, FPROP, column] = _total_update_error(table, fprop_propagation(table, fmt))
        scores[:, DGRAD, column] = _total_update_error(table, dgrad_propagation(table, fmt))
    scores[:, WGRAD] = _ratio(format_column(table, "wdrift2", formats), table.linear["w2"][:, None])
    return scores

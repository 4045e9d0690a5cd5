"""Loss divergence: the effect of an option on the loss of the step that it runs in. Only fprop has one.

dgrad and wgrad do not change the loss of their step. Their effect is on the weights (``weight_divergence.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format, Gemm
from snip_megatron.statistics.table import StatisticsTable

FloatArray = NDArray[np.float64]

FPROP, DGRAD, WGRAD = (list(Gemm).index(g) for g in (Gemm.FPROP, Gemm.DGRAD, Gemm.WGRAD))


def format_column(table: StatisticsTable, column: str, formats: Sequence[str]) -> FloatArray:
    """Return a per-format column, float64 [linears, len(formats)]. See :func:`of_formats`."""
    return of_formats(table, table.by_format[column], formats)


def of_formats[T: np.generic](table: StatisticsTable, values: NDArray[T], formats: Sequence[str]) -> NDArray[T]:
    """Select ``formats`` from the last axis of ``values``, in their order. bf16 has no error and gets zeros.

    Raises SnipError if the table was recorded without one of the formats.
    """
    missing = [f for f in formats if f not in table.formats and f != Format.BF16.value]
    if missing:
        raise SnipError(
            f"the statistics of step {table.step} hold no {missing[0]} (only {', '.join(table.formats)});"
            " record them with the same candidate formats"
        )
    zeros = np.zeros(values.shape[:-1], dtype=values.dtype)
    return np.stack([values[..., table.formats.index(f)] if f in table.formats else zeros for f in formats], axis=-1)


def linear_shape(table: StatisticsTable) -> tuple[FloatArray, FloatArray]:
    """Return (N, K) of every linear, float64 [linears] each."""
    return (
        np.array([row.n for row in table.linears], dtype=np.float64),
        np.array([row.k for row in table.linears], dtype=np.float64),
    )


def experts(table: StatisticsTable) -> FloatArray:
    """Return the number of matrices that each row stands for, float64 [linears]. It is 1 except for experts."""
    return np.array([row.experts for row in table.linears], dtype=np.float64)


def _only_fprop(values: FloatArray) -> FloatArray:
    full = np.zeros((values.shape[0], len(Gemm), values.shape[1]))
    full[:, FPROP] = values
    return full


def second_order(table: StatisticsTable, formats: Sequence[str]) -> FloatArray:
    """Return ΔL₂ = (T/2)·Σ_t (G_t·E_t)² of every option, in nats, float64 [linears, 3, formats] (docs/method.md, loss
    divergence).

    ΔL₂ is additive over options and independent of T: it is the empirical Fisher estimate for the mean token loss.
    """
    return _only_fprop(0.5 * table.tokens * format_column(table, "c2", formats))


def first_order(table: StatisticsTable, formats: Sequence[str]) -> FloatArray:
    """Return ΔL₁ = sqrt(‖D‖²‖δX‖²/(T·K) + ‖∇W‖²‖δW‖²/(N·K)), in nats, float64 [linears, 3, formats].

    ΔL₁ is the RMS of the first-order change. It decreases as 1/√T and is not additive, so it serves only to rank single
    options (docs/method.md).
    """
    n, k = linear_shape(table)
    active = np.array([row.active for row in table.linears])
    from_x = (table.linear["d2"] / (table.tokens * active * k))[:, None] * format_column(table, "dx_row2", formats)
    from_w = (table.linear["gw2"] / (n * k * experts(table)))[:, None] * format_column(table, "dw2", formats)
    return _only_fprop(np.sqrt(from_x + from_w))


def from_norms(table: StatisticsTable, formats: Sequence[str]) -> FloatArray:
    """Return (T/2)·ΔL₁², an estimate of :func:`second_order` without c2 (median ratio 1.01)."""
    estimate: FloatArray = 0.5 * table.tokens * first_order(table, formats) ** 2
    return estimate

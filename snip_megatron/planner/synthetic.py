"""Synthetic losses for a model without statistics. They are seeded, and heavy-tailed as measured losses are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from snip_megatron.precision import Format, Gemm, LinearRow, Role, option_id

ASSUMPTIONS = (
    "losses are synthetic (log-normal over four decades, larger for fprop, for linears that end a branch, and in the"
    " first and the last layers): they show what a budget costs in time and memory, not which options are good;"
    " --statistics uses a run's own",
)

FORMAT_LOSS: Mapping[Format, float] = {
    Format.BF16: 0.0,
    Format.FP8: 0.02,
    Format.MXFP8: 0.03,
    Format.FP8_TENSOR: 0.05,
    Format.NVFP4: 0.5,
    Format.MXFP4: 0.8,
    Format.FP4: 1.0,
}
"""The loss of a format relative to fp4. A variant loses what its base does."""

_DRAWN = tuple(FORMAT_LOSS)

_UNIT = 1e-5  # loss of a median fp4 option, roughly in nats
_WRITES, _MLP = 2.0, 1.8  # of linears that end a branch, and of those outside of attention
_GEMM = (10.0, 3.0, 1.0)  # fprop, dgrad, wgrad
_SPREAD, _FORMAT_SPREAD = 1.5, 0.3


def synthetic_losses(
    rows: Sequence[LinearRow], formats: Sequence[Format], seed: int, *, granularity: str = "gemm"
) -> dict[str, dict[Format, float]]:
    """Return option id → format → loss, rounded to four significant digits. Equal seeds give equal losses."""
    rng = np.random.default_rng(seed)
    block = np.array([row.sub_block // 2 for row in rows])
    depth = 1 + 0.8 * np.exp(-block / 4) + 0.5 * np.exp((block - max(block)) / 4)
    kind = [
        (_WRITES if row.role is Role.WRITES else 1.0) * (1.0 if "attention" in row.id.path else _MLP) for row in rows
    ]
    loss = _UNIT * (depth * kind)[:, None] * np.array(_GEMM) * np.exp(rng.normal(0, _SPREAD, (len(rows), len(Gemm))))
    spread = np.exp(rng.normal(0, _FORMAT_SPREAD, (*loss.shape, len(_DRAWN))))
    spread = spread[..., [_DRAWN.index(fmt.base) for fmt in formats]]
    relative = np.array([FORMAT_LOSS[fmt.base] for fmt in formats])
    losses = loss[..., None] * (relative * spread)
    found: dict[str, dict[Format, float]] = {}
    for row, own in zip(rows, losses, strict=True):
        if granularity == "layer":
            found[row.name] = _row(formats, own.sum(axis=0), None)
        else:
            found |= {option_id(row.name, gemm): _row(formats, own[g], gemm) for g, gemm in enumerate(Gemm)}
    return found


def _row(formats: Sequence[Format], values: np.ndarray, gemm: Gemm | None) -> dict[Format, float]:
    return {
        fmt: float(f"{value:.4g}")
        for fmt, value in zip(formats, values.tolist(), strict=True)
        if gemm is None or gemm in fmt.gemms
    }

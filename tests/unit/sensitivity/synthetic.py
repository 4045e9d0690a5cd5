"""Statistics tables with chosen numbers."""

from dataclasses import replace

import numpy as np

from snip_megatron.precision import DENSE_LAYER, LinearRow
from snip_megatron.sensitivity.table import (
    BOUNDARY_COLUMNS,
    FORMAT_COLUMNS,
    LINEAR_COLUMNS,
    RHO_GRID,
    SinkRow,
    StatisticsTable,
)

SHAPES = {
    "self_attention.linear_qkv": (192, 64),
    "self_attention.linear_proj": (64, 64),
    "mlp.linear_fc1": (256, 64),
    "mlp.linear_fc2": (64, 128),
}


def linear_rows(layers: int, stages: int = 1) -> tuple[LinearRow, ...]:
    return tuple(
        LinearRow(f"decoder.layers.{i}.{kind}", i * stages // layers, *SHAPES[kind])
        for i in range(layers)
        for kind in DENSE_LAYER
    )


def make_table(
    layers: int = 2, stages: int = 1, formats: tuple[str, ...] = ("fp8", "fp4"), seed: int = 0
) -> StatisticsTable:
    """Random positive statistics; every error of fp8 is a hundredth of fp4's; drift is linear in ρ up to 1."""
    rng = np.random.default_rng(seed)
    rows = linear_rows(layers, stages)
    n = len(rows)
    norms = [SinkRow(f"decoder.norm.{b}", b, 64) for b in range(2 * layers + 1)]
    sinks = (SinkRow("embedding.word_embeddings", 0, 4096), *norms)
    error = np.array([{"fp4": 1.0}.get(f, 1e-2) for f in formats])
    grid = np.minimum(RHO_GRID, 1.0)[None, :] ** 2
    return StatisticsTable(
        step=7, tokens=1024, tokens_per_step=4096, formats=formats, linears=rows, sinks=sinks, arrays={
            **{f"linear.{c}": rng.uniform(0.5, 2.0, n) for c in LINEAR_COLUMNS},
            **{f"by_format.{c}": rng.uniform(0.01, 0.02, (n, 1)) * error for c in FORMAT_COLUMNS},
            **{f"boundary.{c}": rng.uniform(0.5, 2.0, 2 * layers + 1) for c in BOUNDARY_COLUMNS},
            "drift2": rng.uniform(0.5, 2.0, (n, 1)) * grid,
            "sink_drift2": rng.uniform(0.5, 2.0, (len(sinks), 1)) * grid,
            "sink_w2": rng.uniform(0.5, 2.0, len(sinks)),
        },
    )  # fmt: skip


def with_experts(table: StatisticsTable, experts: int = 8, active: int = 2) -> StatisticsTable:
    """The table with the last layer's MLP as a mixture of experts."""
    last = table.linears[-1].id.layer
    rows = [
        replace(row, name=row.name.replace(".mlp.", ".mlp.experts."), experts=experts, active=active)
        if row.id.layer == last and ".mlp." in row.name
        else row
        for row in table.linears
    ]
    return replace(table, linears=tuple(rows))


def with_columns(table: StatisticsTable, group: str, **columns: np.ndarray | float) -> StatisticsTable:
    """A copy with whole columns of a group replaced (a number fills the column); ``group`` "" has the other arrays."""
    arrays = dict(table.arrays)
    for column, value in columns.items():
        name = f"{group}.{column}" if group else column
        arrays[name] = np.broadcast_to(np.asarray(value, dtype=np.float64), arrays[name].shape).copy()
    return replace(table, arrays=arrays)


def scaled_loss(table: StatisticsTable, c: float) -> StatisticsTable:
    """The table of the same model whose loss is multiplied by ``c``: gradients scale, AdamW's update does not."""
    linear = {name: table.linear[name] * c**2 for name in ("g2", "d2", "gw2", "s2", "gs2", "fg2")}
    by_format = {name: table.by_format[name] * c**2 for name in ("dg_row2", "dg_col2", "c2")}
    boundary = {name: table.boundary[name] * c**2 for name in ("r2", "branch_r2", "cn2", "fr2")}
    for group, columns in (("linear", linear), ("by_format", by_format), ("boundary", boundary)):
        table = with_columns(table, group, **columns)
    return table

"""From every rank's sums to one table: a single float64 all-reduce a stage of the probe.

Each rank adds what it alone knows to the rows of its linears; replicated tensors are reported by one rank only, so the
sum over all ranks is the global sum on every parallel layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from snip_megatron.layers.context import LinearHandle
from snip_megatron.precision import LinearId
from snip_megatron.statistics.boundaries import Boundary
from snip_megatron.statistics.recorder import Dots, LinearRecorder
from snip_megatron.statistics.table import (
    BOUNDARY_COLUMNS,
    FORMAT_COLUMNS,
    LINEAR_COLUMNS,
    RHO_GRID,
    LinearRow,
    SinkRow,
    StatisticsTable,
)

# Powers of the gradient's scale in each column: G is recorded as autograd gives it, the table wants ∂L/∂Y of the mean
# token loss; one named factor converts (DESIGN, "Statistics' scale"). Columns that are not named hold no gradient.
_GRADIENT_POWER = {
    **dict.fromkeys(("g2", "d2", "s2", "gs2", "fg2", "bg2", "c2", "dg_row2", "dg_col2"), 2),
    **dict.fromkeys(("r2", "branch_r2", "cn2", "fr2", "br2"), 2),
}


@dataclass(frozen=True)
class ProbeGroups:
    """The process groups a probe reduces over. ``world`` None is the default group.

    Attributes:
        tp: tensor parallel group.
        dp: data parallel group whose ranks hold distinct tokens.
        world: all training ranks.
        experts: the same of the weights of experts, whose data parallel ranks are those with the same experts; None
            without experts.
    """

    tp: dist.ProcessGroup | None
    dp: dist.ProcessGroup | None
    world: dist.ProcessGroup | None = None
    experts: ProbeGroups | None = None

    def of(self, handle: LinearHandle) -> ProbeGroups:
        """Those of one linear."""
        return self if handle.expert is None or self.experts is None else self.experts

    def split(self, recorders: Sequence[LinearRecorder]) -> list[tuple[ProbeGroups, list[LinearRecorder]]]:
        """Recorders by groups; kinds that this rank has none of are left out, as by all of its peers."""
        kinds = [(self, [r for r in recorders if self.of(r.handle) is self])]
        if self.experts is not None:
            kinds.append((self.experts, [r for r in recorders if self.of(r.handle) is self.experts]))
        return [(groups, own) for groups, own in kinds if own]

    @property
    def dp_rank(self) -> int:
        """Rank among data parallel peers."""
        return dist.get_rank(self.dp)

    @property
    def dp_size(self) -> int:
        """Number of data parallel peers."""
        return dist.get_world_size(self.dp)


@dataclass(frozen=True)
class TableShape:
    """What the table has rows for, on every rank the same.

    ``mixture``: how many matrices a row of experts stands for, and how many of them a token goes through.
    """

    names: tuple[str, ...]
    formats: tuple[str, ...]
    sinks: tuple[SinkRow, ...]
    mixture: tuple[int, int] = (1, 1)

    @property
    def boundaries(self) -> int:
        """2L + 1."""
        return 2 * (1 + max(LinearId.parse(name).layer for name in self.names)) + 1


class PartialTable:
    """This rank's additive share of the table's arrays."""

    def __init__(self, shape: TableShape, gradient_scale: float) -> None:
        self.shape = shape
        self._scale2 = gradient_scale**2
        self._row = {name: index for index, name in enumerate(shape.names)}
        n, f, b, s, grid = len(shape.names), len(shape.formats), shape.boundaries, len(shape.sinks), len(RHO_GRID)
        self.arrays: dict[str, torch.Tensor] = {
            **{f"linear.{c}": torch.zeros(n, dtype=torch.float64) for c in LINEAR_COLUMNS},
            **{f"by_format.{c}": torch.zeros(n, f, dtype=torch.float64) for c in FORMAT_COLUMNS},
            **{f"boundary.{c}": torch.zeros(b, dtype=torch.float64) for c in BOUNDARY_COLUMNS},
            "drift2": torch.zeros(n, grid, dtype=torch.float64),
            "sink_drift2": torch.zeros(s, grid, dtype=torch.float64),
            "sink_w2": torch.zeros(s, dtype=torch.float64),
            "layout": torch.zeros(n, 3, dtype=torch.float64),
        }
        self._on_device: list[tuple[str, int, torch.Tensor, float]] = []

    def _add(self, array: str, row: int, value: torch.Tensor | float, column: str) -> None:
        scale = self._scale2 if _GRADIENT_POWER.get(column) else 1.0
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            self._on_device.append((array, row, value.detach().double(), scale))  # one copy for all, in _fetch
            return
        self.arrays[array][row] += (value.detach().double() if isinstance(value, torch.Tensor) else value) * scale

    def _fetch(self) -> None:
        """Add what is still on the device: one copy to the host instead of a wait a value."""
        if not self._on_device:
            return
        values = torch.cat([value.reshape(-1) for _, _, value, _ in self._on_device]).cpu()
        parts = torch.split(values, [value.numel() for _, _, value, _ in self._on_device])
        for part, (array, row, value, scale) in zip(parts, self._on_device, strict=True):
            self.arrays[array][row] += part.view(value.shape) * scale
        self._on_device.clear()

    def _linear_row(self, name: str, layout: np.ndarray) -> LinearRow:
        stage, n, k = map(int, layout)
        return LinearRow(name, stage, n, k, *(self.shape.mixture if LinearId.parse(name).of_experts else (1, 1)))

    def add_recorder(self, recorder: LinearRecorder, dp_rank: int) -> None:
        """Add the sums a recorder holds, then forget them. Weights are the same on all data parallel ranks."""
        row = self._row[recorder.handle.name]
        for name, value in recorder.sums.items():
            if name != "w2" or dp_rank == 0:
                self._add(f"linear.{name}", row, value, name)
        for name, values in recorder.by_format.items():
            if name != "dw2" or dp_rank == 0:
                self._add(f"by_format.{name}", row, values, name)
        recorder.sums.clear()
        recorder.by_format.clear()

    def add_boundary(self, boundary: Boundary) -> None:
        """Add the sums a boundary holds, then forget them."""
        for name, value in boundary.sums.items():
            self._add(f"boundary.{name}", boundary.index, value, name)
        boundary.sums.clear()

    def add_linear(self, name: str, column: str, value: torch.Tensor | float) -> None:
        """Add to one column of a linear."""
        self._add(f"linear.{column}", self._row[name], value, column)

    def add_by_format(self, name: str, column: str, values: torch.Tensor) -> None:
        """Add to a per-format column of a linear; values [formats]."""
        self._add(f"by_format.{column}", self._row[name], values, column)

    def add_drift(self, name: str, values: torch.Tensor) -> None:
        """Add a linear's squared drift over the ρ grid."""
        self._add("drift2", self._row[name], values, "drift2")

    def add_sink(self, index: int, drift2: torch.Tensor, w2: torch.Tensor) -> None:
        """Add a sink's squared drift over the ρ grid and ‖W‖²."""
        self._add("sink_drift2", index, drift2, "sink_drift2")
        self._add("sink_w2", index, w2, "sink_w2")

    def add_layout(self, name: str, stage: int, n: int, k: int) -> None:
        """Report where a linear lives; by exactly one rank."""
        self._add("layout", self._row[name], torch.tensor([stage, n, k], dtype=torch.float64), "layout")

    def reduce(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Sum over all ranks in one float64 all-reduce: afterwards every rank holds the global arrays."""
        self._fetch()
        flat = torch.cat([array.reshape(-1) for array in self.arrays.values()]).to(device)
        dist.all_reduce(flat, group=group)
        flat = flat.cpu()
        offset = 0
        for name, array in self.arrays.items():
            self.arrays[name] = flat[offset : offset + array.numel()].view(array.shape)
            offset += array.numel()

    def merge(self, other: PartialTable) -> None:
        """Add another, equally reduced, share."""
        for name, array in other.arrays.items():
            self.arrays[name] += array

    def linear(self, name: str, column: str) -> float:
        """One reduced value."""
        return float(self.arrays[f"linear.{column}"][self._row[name]])

    def matrices(self) -> torch.Tensor:
        """How many each row stands for, float64 [linears]."""
        each = [self.shape.mixture[0] if LinearId.parse(name).of_experts else 1 for name in self.shape.names]
        return torch.tensor(each, dtype=torch.float64)

    def to_table(self, *, step: int, tokens: int, tokens_per_step: int, meta: dict[str, float]) -> StatisticsTable:
        """The finished table, with the entries that follow from others."""
        arrays = {name: array.numpy() for name, array in self.arrays.items()}
        layout = arrays.pop("layout").astype(np.int64)
        rows = tuple(self._linear_row(name, layout[i]) for i, name in enumerate(self.shape.names))
        groups: dict[str, dict[str, np.ndarray]] = {"linear": {}, "by_format": {}, "boundary": {}}
        for name, array in arrays.items():
            group, _, column = name.partition(".")
            if column:
                groups[group][column] = array
        np.maximum(groups["linear"]["gv2"], 0.0, out=groups["linear"]["gv2"])  # a difference of two estimates
        _complete_row_parallel(rows, groups["linear"], groups["by_format"], groups["boundary"])
        return StatisticsTable(
            step=step,
            tokens=tokens,
            tokens_per_step=tokens_per_step,
            formats=self.shape.formats,
            linears=rows,
            sinks=self.shape.sinks,
            linear=groups["linear"],
            by_format=groups["by_format"],
            boundary=groups["boundary"],
            drift2=arrays["drift2"],
            sink_drift2=arrays["sink_drift2"],
            sink_w2=arrays["sink_w2"],
            meta=meta,
        )


def _complete_row_parallel(
    rows: Sequence[LinearRow],
    linear: dict[str, np.ndarray],
    by_format: dict[str, np.ndarray],
    boundary: dict[str, np.ndarray],
) -> None:
    """Y and E of a linear that writes to the residual stream are partial sums on each tensor parallel rank, whose norms
    mean nothing. Y is what its branch adds to the stream; E comes from the operands' errors (METHOD, local errors)."""
    for i, row in enumerate(rows):
        if row.id.is_first:
            continue
        linear["y2"][i] = boundary["branch_h2"][row.id.sub_block]
        products = by_format["dx_row2"][i] * linear["w2"][i] + linear["x2"][i] * by_format["dw2"][i]
        by_format["e2"][i] = products / (row.k * row.experts)  # experts' weights are of about one size


def finish_dots(recorders: Sequence[LinearRecorder], groups: ProbeGroups) -> None:
    """Turn the recorders' partial G_t·E_t into ``c2``, with one all-reduce over each tensor parallel group."""
    for own, some in groups.split(recorders):
        _finish_dots(some, own)


def _finish_dots(recorders: Sequence[LinearRecorder], groups: ProbeGroups) -> None:
    dots = [one for recorder in recorders for one in recorder.dots]
    if dist.get_world_size(groups.tp) > 1 and dots:
        parts = iter(_summed([part for one in dots for part in _sums_of(one)], groups.tp))
        dots = [Dots(next(parts), one.rows, next(parts), None if one.known is None else next(parts)) for one in dots]
    whole = iter(dots)
    for recorder in recorders:
        squared = [next(whole).squared() for _ in recorder.dots]
        recorder.dots.clear()
        if recorder.handle.tp_rank == 0 and squared:
            recorder.by_format["c2"] = torch.stack(squared).sum(0)


def _sums_of(dots: Dots) -> list[torch.Tensor]:
    return [part for part in (dots.values, dots.share, dots.known) if part is not None]


def reduce_columns(recorders: Sequence[LinearRecorder], groups: ProbeGroups) -> None:
    """Sum the recorders' column norms over data parallel ranks, in one all-reduce of each kind of group; of experts
    their own sums, too, which the table does not tell apart."""
    for own, some in groups.split(recorders):
        for recorder in some:
            recorder.complete_columns()
        if own is not groups:
            for recorder in some:
                recorder.whole = recorder.own_sums()
            _reduce(some, ("whole",), own.tp)
            _reduce(some, ("whole",), own.dp)
        _reduce(some, ("x_cols", "g_cols", "dx_cols", "dg_cols"), own.dp)


def _reduce(recorders: Sequence[LinearRecorder], names: Sequence[str], group: dist.ProcessGroup | None) -> None:
    if dist.get_world_size(group) == 1:
        return
    whole = iter(_summed([getattr(recorder, name) for recorder in recorders for name in names], group))
    for recorder in recorders:
        for name in names:
            setattr(recorder, name, next(whole))


def _summed(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """The tensors summed over a group, in one all-reduce."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

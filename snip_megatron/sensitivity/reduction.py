"""Reduces every rank's sums to one table, with a single float64 all-reduce for each stage of the probe.

Each rank adds its own share to the rows of its linears. Exactly one rank reports a replicated tensor. The sum over all
ranks is therefore the global sum on every parallel layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from snip_megatron.layers.context import LinearHandle
from snip_megatron.precision import LinearRow, Role
from snip_megatron.sensitivity.recorder import Boundary, Dots, LinearRecorder
from snip_megatron.sensitivity.table import SinkRow, StatisticsTable, array_shapes

# Columns that hold the square of a gradient. G is recorded as autograd gives it, and the table holds ∂L/∂Y of the mean
# token loss, so these columns are multiplied by the square of one factor (docs/how-it-works.md, definitions).
_GRADIENT_COLUMNS = frozenset(
    ("g2", "d2", "s2", "gs2", "fg2", "c2", "dg_row2", "dg_col2", "r2", "branch_r2", "cn2", "fr2")
)


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks in a group; 1 in a process that has not initialised torch.distributed."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


@dataclass(frozen=True)
class ProbeGroups:
    """The process groups that a probe reduces over, before all ranks: data parallel ranks hold distinct tokens.

    ``experts`` are the groups of the weights of experts, whose data parallel ranks are those with the same experts;
    None if the model has no experts.
    """

    tp: dist.ProcessGroup | None
    dp: dist.ProcessGroup | None
    experts: ProbeGroups | None = None

    def of(self, handle: LinearHandle) -> ProbeGroups:
        return self if handle.expert is None or self.experts is None else self.experts

    def split(self, recorders: Sequence[LinearRecorder]) -> list[tuple[ProbeGroups, list[LinearRecorder]]]:
        """Split recorders by their groups, without groups that this rank and its peers have no recorder of."""
        kinds = [self] if self.experts is None else [self, self.experts]
        split = [(groups, [r for r in recorders if self.of(r.handle) is groups]) for groups in kinds]
        return [(groups, own) for groups, own in split if own]

    @property
    def tp_rank(self) -> int:
        return dist.get_rank(self.tp) if dist.is_initialized() else 0

    @property
    def dp_rank(self) -> int:
        return dist.get_rank(self.dp) if dist.is_initialized() else 0

    @property
    def dp_size(self) -> int:
        return group_size(self.dp)


@dataclass(frozen=True)
class TableShape:
    """Rows and columns of the table, the same on every rank."""

    linears: tuple[LinearRow, ...]
    formats: tuple[str, ...]
    sinks: tuple[SinkRow, ...]


class PartialTable:
    """This rank's share of the table's arrays. The shares of all ranks add up to the table."""

    def __init__(self, shape: TableShape, gradient_scale: float) -> None:
        self.shape = shape
        self._scale2 = gradient_scale**2
        self._row = {row.name: index for index, row in enumerate(shape.linears)}
        shapes = array_shapes(shape.linears, shape.formats, shape.sinks)
        self.arrays = {name: torch.zeros(size, dtype=torch.float64) for name, size in shapes.items()}
        self._on_device: list[tuple[str, int, torch.Tensor, float]] = []

    def _add(self, array: str, row: int, value: torch.Tensor | float, column: str) -> None:
        scale = self._scale2 if column in _GRADIENT_COLUMNS else 1.0
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            self._on_device.append((array, row, value.detach().double(), scale))  # reduce() copies all of them at once
            return
        self.arrays[array][row] += (value.detach().double() if isinstance(value, torch.Tensor) else value) * scale

    def _finish(self) -> None:
        """Add the values that are still on the device, with one copy to the host."""
        if not self._on_device:
            return
        values = torch.cat([value.reshape(-1) for _, _, value, _ in self._on_device]).cpu().numpy()
        # Thousands of values: NumPy adds one in a third of the time of a torch operation, with the same bits.
        arrays, end = {name: array.numpy() for name, array in self.arrays.items()}, 0
        with np.errstate(all="ignore"):  # what is not finite is found in the table
            for array, row, value, scale in self._on_device:
                begin, end = end, end + value.numel()
                arrays[array][row] += values[begin:end].reshape(value.shape) * scale
        self._on_device.clear()

    def add_recorder(self, recorder: LinearRecorder, dp_rank: int) -> None:
        """Add a recorder's sums, and clear them. One data parallel rank reports weights, which all have."""
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
        """Add the sums of a boundary, and clear them."""
        for name, value in boundary.sums.items():
            self._add(f"boundary.{name}", boundary.index, value, name)
        boundary.sums.clear()

    def add(self, name: str, array: str, value: torch.Tensor) -> None:
        """Add to a linear's row of one of the arrays: "linear.gw2", "by_format.wdrift2", "drift2" and so on."""
        self._add(array, self._row[name], value, array.rpartition(".")[2])

    def add_sink(self, index: int, drift2: torch.Tensor, w2: torch.Tensor) -> None:
        """Add the squared update error of a sink over the ρ grid, and its ‖W‖²."""
        self._add("sink_drift2", index, drift2, "sink_drift2")
        self._add("sink_w2", index, w2, "sink_w2")

    def reduce(self, device: torch.device) -> None:
        """Sum over all ranks in one float64 all-reduce. Afterwards every rank holds the global arrays."""
        self._finish()
        if not dist.is_initialized():  # a process of its own
            return
        flat = torch.cat([array.reshape(-1) for array in self.arrays.values()]).to(device)
        dist.all_reduce(flat)
        flat = flat.cpu()
        offset = 0
        for name, array in self.arrays.items():
            self.arrays[name] = flat[offset : offset + array.numel()].view(array.shape)
            offset += array.numel()

    def merge(self, other: PartialTable) -> None:
        """Add another share that has been reduced over the same ranks."""
        for name, array in other.arrays.items():
            self.arrays[name] += array

    def linear(self, name: str, column: str) -> float:
        return float(self.arrays[f"linear.{column}"][self._row[name]])

    def to_table(self, *, step: int, tokens: int, tokens_per_step: int, meta: dict[str, float]) -> StatisticsTable:
        """Return the finished table, with the entries that follow from others."""
        arrays = {name: array.numpy() for name, array in self.arrays.items()}
        rows = self.shape.linears
        groups: dict[str, dict[str, np.ndarray]] = {"linear": {}, "by_format": {}, "boundary": {}}
        for name, array in arrays.items():
            group, _, column = name.partition(".")
            if column:
                groups[group][column] = array
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
    """Fill in ``y2`` and ``e2`` of the linears that do not read the residual stream.

    On each tensor parallel rank their Y and E may be partial sums, whose norms have no meaning. ‖Y‖ is that of the
    branch's contribution to the stream, or follows from the operands where the linear stands inside of the branch. ‖E‖
    follows from the errors of the operands (how-it-works.md, local errors).
    """
    for i, row in enumerate(rows):
        if row.role is Role.READS:
            continue
        linear["y2"][i] = boundary["branch_h2"][row.sub_block]
        if row.role is Role.BETWEEN:
            linear["y2"][i] = linear["x2"][i] * linear["w2"][i] / (row.k * row.experts)
        products = by_format["dx_row2"][i] * linear["w2"][i] + linear["x2"][i] * by_format["dw2"][i]
        by_format["e2"][i] = products / (row.k * row.experts)  # assumes that the experts' weights are of about one size


def finish_dots(recorders: Sequence[LinearRecorder], groups: ProbeGroups) -> None:
    """Turn the recorders' partial G_t·E_t into ``c2``, with one all-reduce in each tensor parallel group."""
    for own, some in groups.split(recorders):
        dots = [one for recorder in some for one in recorder.dots]
        if group_size(own.tp) > 1 and dots:
            given = [part for one in dots for part in (one.values, one.share, one.known) if part is not None]
            parts = iter(_summed(given, own.tp))
            dots = [Dots(next(parts), d.rows, next(parts), None if d.known is None else next(parts)) for d in dots]
        whole = iter(dots)
        for recorder in some:
            squared = [next(whole).squared() for _ in recorder.dots]
            recorder.dots.clear()
            if recorder.handle.tp_rank == 0 and squared:
                recorder.by_format["c2"] = torch.stack(squared).sum(0)


def reduce_columns(recorders: Sequence[LinearRecorder], groups: ProbeGroups) -> None:
    """Sum the recorders' column norms over data parallel ranks, with one all-reduce for each kind of group.

    For experts, the sums of each expert alone are reduced as well, because the table adds up all experts of a layer.
    """
    for own, some in groups.split(recorders):
        if own is not groups:
            for recorder in some:
                recorder.whole = recorder.own_sums()
            _reduce(some, ("whole",), own.tp)
            _reduce(some, ("whole",), own.dp)
        _reduce(some, ("x_cols", "g_cols", "dx_cols", "dg_cols"), own.dp)


def _reduce(recorders: Sequence[LinearRecorder], names: Sequence[str], group: dist.ProcessGroup | None) -> None:
    if group_size(group) == 1:
        return
    whole = iter(_summed([getattr(recorder, name) for recorder in recorders for name in names], group))
    for recorder in recorders:
        for name in names:
            setattr(recorder, name, next(whole))


def _summed(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Return the tensors summed over a group, with one all-reduce."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

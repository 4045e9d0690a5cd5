"""The reduction of every rank's sums to one table, with one float64 all-reduce for each stage of the probe.

Each rank adds its own share to the rows of its linears. Exactly one rank reports a replicated tensor. The sum over all
ranks is therefore the global sum on every parallel layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from snip_megatron.layers.context import LinearHandle
from snip_megatron.precision import LinearRow, Role
from snip_megatron.sensitivity.recorder import Boundary, LinearRecorder
from snip_megatron.sensitivity.table import SinkRow, StatisticsTable, array_shapes

# Columns that hold the square of a gradient. G is recorded as autograd gives it, and the table holds ∂L/∂Y of the mean
# token loss, so these columns are multiplied by the square of one factor (docs/how-it-works.md, definitions).
_GRADIENT_COLUMNS = frozenset(
    ("g2", "d2", "s2", "gs2", "fg2", "c2", "dg_row2", "dg_col2", "r2", "branch_r2", "cn2", "fr2")
)


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks in a group. It is 1 in a process that has not initialised torch.distributed."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


@dataclass(frozen=True)
class ProbeGroups:
    """The process groups that a probe reduces over, before all ranks: data parallel ranks hold distinct tokens."""

    tp: dist.ProcessGroup | None
    dp: dist.ProcessGroup | None
    experts: ProbeGroups | None = None  # of experts: data parallel ranks have the same ones. None without experts

    def of(self, handle: LinearHandle) -> ProbeGroups:
        """Return the groups of a linear."""
        return self if handle.expert is None or self.experts is None else self.experts

    def split(self, recorders: Sequence[LinearRecorder]) -> list[tuple[ProbeGroups, list[LinearRecorder]]]:
        """Split recorders by their groups. Leaves out groups of which this rank and its peers have no recorder."""
        kinds = [self] if self.experts is None else [self, self.experts]
        split = [(groups, [r for r in recorders if self.of(r.handle) is groups]) for groups in kinds]
        return [(groups, members) for groups, members in split if members]

    @property
    def tp_rank(self) -> int:
        return dist.get_rank(self.tp) if dist.is_initialized() else 0

    @property
    def dp_rank(self) -> int:
        return dist.get_rank(self.dp) if dist.is_initialized() else 0

    @property
    def dp_size(self) -> int:
        return group_size(self.dp)


@dataclass(eq=False)
class PartialTable:
    """This rank's share of the table's arrays. Those of all ranks, which have the same rows, add up to the table."""

    linears: tuple[LinearRow, ...]
    formats: tuple[str, ...]
    sinks: tuple[SinkRow, ...]
    gradient_scale: float = 1.0

    def __post_init__(self) -> None:
        self._row = {row.name: index for index, row in enumerate(self.linears)}
        # By their names in the table, float64. They hold the values that were added before the last :meth:`pack`.
        shapes = array_shapes(self.linears, self.formats, self.sinks)
        self.arrays = {name: np.zeros(size) for name, size in shapes.items()}
        self._added: list[tuple[str, int, torch.Tensor]] = []

    def empty(self) -> PartialTable:
        """Return a share of zeros of the same table."""
        return replace(self)

    def add(self, array: str, row: str | int, value: torch.Tensor) -> None:
        """Add to a row of an array. Rows are names of linears, or indices of boundaries and sinks."""
        self._added.append((array, self._row[row] if isinstance(row, str) else row, value.detach()))

    def add_recorder(self, recorder: LinearRecorder, dp_rank: int) -> None:
        """Add a recorder's sums, and clear them. One data parallel rank reports weights, which all have."""
        for column, value in recorder.sums.items():
            if column not in ("w2", "dw2") or dp_rank == 0:
                self.add(f"by_format.{column}" if value.dim() else f"linear.{column}", recorder.handle.name, value)
        recorder.sums.clear()

    def add_boundary(self, boundary: Boundary) -> None:
        """Add the sums of a boundary, and clear them."""
        for column, value in boundary.sums.items():
            self.add(f"boundary.{column}", boundary.index, value)
        boundary.sums.clear()

    def pack(self, device: torch.device) -> PartialTable:
        """Add up what was added, and copy the arrays to ``device`` for :meth:`reduce`. Returns the table itself."""
        if self._added:
            # One copy to the host: a copy for each value would wait for the device thousands of times.
            flat = torch.cat([value.to(device, torch.float64).reshape(-1) for _, _, value in self._added])
            values = flat.cpu().numpy()
            with np.errstate(all="ignore"):  # StatisticsTable.non_finite finds what is not finite
                for array, row, value in self._added:
                    part, values = values[: value.numel()].reshape(value.shape), values[value.numel() :]
                    column = array.rpartition(".")[2]
                    self.arrays[array][row] += part * (self.gradient_scale**2 if column in _GRADIENT_COLUMNS else 1.0)
            self._added.clear()
        self._packed = torch.from_numpy(np.concatenate([array.ravel() for array in self.arrays.values()])).to(device)
        return self

    def reduce(self) -> None:
        """Sum over all ranks in one float64 all-reduce. Afterwards every rank holds the global arrays."""
        if not dist.is_initialized():  # a process of its own
            return
        dist.all_reduce(self._packed)
        offsets = np.cumsum([array.size for array in self.arrays.values()])
        parts = np.split(self._packed.cpu().numpy(), offsets[:-1])
        self.arrays = {
            name: part.reshape(array.shape) for (name, array), part in zip(self.arrays.items(), parts, strict=True)
        }

    def merge(self, other: PartialTable) -> None:
        """Add another share that has been reduced over the same ranks."""
        for name, array in other.arrays.items():
            self.arrays[name] += array

    def linear(self, name: str, column: str) -> float:
        return float(self.arrays[f"linear.{column}"][self._row[name]])

    def to_table(self, *, step: int, tokens: int, tokens_per_step: int, meta: dict[str, float]) -> StatisticsTable:
        """Return the finished table, with the entries that follow from others."""
        _complete_row_parallel(self.linears, self.arrays)
        sizes = step, tokens, tokens_per_step
        return StatisticsTable(*sizes, self.formats, self.linears, self.sinks, self.arrays, meta)


def _complete_row_parallel(rows: Sequence[LinearRow], arrays: dict[str, np.ndarray]) -> None:
    """Fill in ``y2`` and ``e2`` of the linears that do not read the residual stream.

    On each tensor parallel rank their Y and E may be partial sums, whose norms have no meaning. ‖Y‖ is that of the
    branch's contribution to the stream, or follows from the operands where the linear stands inside of the branch. ‖E‖
    follows from the errors of the operands (how-it-works.md, local errors).
    """
    y2, e2, x2, w2 = (arrays[name] for name in ("linear.y2", "by_format.e2", "linear.x2", "linear.w2"))
    for i, row in enumerate(rows):
        if row.role is Role.READS:
            continue
        y2[i] = arrays["boundary.branch_h2"][row.sub_block]
        if row.role is Role.BETWEEN:
            y2[i] = x2[i] * w2[i] / (row.k * row.experts)
        products = arrays["by_format.dx_row2"][i] * w2[i] + x2[i] * arrays["by_format.dw2"][i]
        e2[i] = products / (row.k * row.experts)  # assumes that the experts' weights are of about one size


Together = Callable[[Callable[[], Any]], Any]
"""Returns what its argument returns, if it returns something on all ranks. Collective, and may raise an exception."""


def reduce_loss_effects(recorders: Sequence[LinearRecorder], groups: ProbeGroups, together: Together) -> None:
    """Sum the recorders' inner products of output errors, whose G_t·E_t is a partial sum, over tensor parallel ranks.

    Collective: one all-reduce in each tensor parallel group.
    """

    def tensors(recorder: LinearRecorder) -> list[torch.Tensor]:
        return [part for d in recorder.dots for part in (d.values, d.norms2, d.dots) if part is not None]

    _reduce(groups.split(recorders), tensors, lambda over: [over.tp], together)


def add_loss_effects(table: PartialTable, recorders: Sequence[LinearRecorder]) -> None:
    """Add ``c2`` of every recorder, from its reduced inner products of output errors, and clear these."""
    for recorder in recorders:
        if recorder.handle.tp_rank == 0 and recorder.dots:
            squared = torch.stack([dots.squared() for dots in recorder.dots])
            table.add("by_format.c2", recorder.handle.name, squared.sum(0))
        recorder.dots.clear()


def reduce_columns(recorders: Sequence[LinearRecorder], groups: ProbeGroups, together: Together) -> None:
    """Sum the recorders' column norms over data parallel ranks, with one all-reduce for each kind of group.

    For experts, the sums of each expert alone are reduced as well, because the table adds up all experts of a layer.
    Collective.
    """
    split = groups.split(recorders)
    experts = [(of_experts, members) for of_experts, members in split if of_experts is not groups]

    def of_expert(recorder: LinearRecorder) -> list[torch.Tensor]:
        recorder.expert_sums = recorder.local_expert_sums()
        return [recorder.expert_sums]

    _reduce(experts, of_expert, lambda over: [over.tp, over.dp], together)
    _reduce(split, lambda r: [r.x_cols, r.g_cols, r.dx_cols, r.dg_cols], lambda over: [over.dp], together)


def _reduce(
    split: Sequence[tuple[ProbeGroups, Sequence[LinearRecorder]]],
    tensors: Callable[[LinearRecorder], list[torch.Tensor]],
    chosen: Callable[[ProbeGroups], Sequence[dist.ProcessGroup | None]],
    together: Together,
) -> None:
    """Sum tensors of recorders over groups in place, with one all-reduce for each group.

    Args:
        split: The recorders by their groups.
        tensors: Returns the tensors of a recorder.
        chosen: Returns the groups over which they are summed, in order.
        together: Packs the tensors, before any rank enters a collective.
    """

    def pack() -> list[tuple[torch.Tensor | None, list[torch.Tensor]]]:
        packed: list[tuple[torch.Tensor | None, list[torch.Tensor]]] = []
        for groups, recorders in split:
            parts = [tensor for recorder in recorders for tensor in tensors(recorder)]
            shared = parts and any(group_size(group) > 1 for group in chosen(groups))
            packed.append((torch.cat([part.reshape(-1) for part in parts]) if shared else None, parts))
        return packed

    for (groups, _), (flat, parts) in zip(split, together(pack), strict=True):
        if flat is None:
            continue
        for group in chosen(groups):
            if group_size(group) > 1:
                dist.all_reduce(flat, group=group)
        for part, total in zip(parts, torch.split(flat, [part.numel() for part in parts]), strict=True):
            part.copy_(total.view(part.shape))

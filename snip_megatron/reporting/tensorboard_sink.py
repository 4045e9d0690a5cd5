"""SNIP's figures in Megatron's own TensorBoard log (``--tensorboard-dir``): scalars, and the map as a table.

Megatron opens its ``SummaryWriter`` on the **last** rank. ``get_tensorboard_writer()`` returns None on other ranks or
when TensorBoard is off. TensorBoard accepts figures in any order, so each figure is written at its own iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from snip_megatron.precision import PrecisionMap
from snip_megatron.reporting.sinks import MAP_COLUMNS, PREFIX, WriterSink, map_figures, map_rows


class TensorBoardSink(WriterSink):
    """A sink that writes to ``writer``, a ``SummaryWriter``. None disables it."""

    name = "TensorBoard"

    def _write(self, iteration: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, iteration)

    def _write_map(self, iteration: int, precision_map: PrecisionMap, linears: Sequence[str]) -> None:
        rows = map_rows(precision_map, linears)
        lines = [MAP_COLUMNS, ["---"] * len(MAP_COLUMNS), *rows]
        self._writer.add_text(f"{PREFIX}map", "\n".join(f"| {' | '.join(line)} |" for line in lines), iteration)
        self._write(iteration, map_figures(precision_map, rows))

"""SNIP's figures in Megatron's own wandb run.

Megatron opens its wandb run on the **last** rank. ``get_wandb_writer()`` returns the ``wandb`` module there, and None
on other ranks or when wandb is off. The sink can therefore show only what the last rank knows, such as the map and the
loss. (Rank 0 writes the run directory.)

Rows have Megatron's iteration (the number of completed steps) as wandb's step, so that the panels line up with its
``lm loss``. wandb drops rows below its current step. Reading the current step may take up to 30 s, so the sink keeps
track of it by calls of ``begin_step``:

    sink = WandbSink(get_wandb_writer())
    sink.begin_step(N)                     # at the start of every train_step(N): Megatron has logged up to iteration N
    sink.metric(N - 1, fp4_fraction=0.75)  # late figures join iteration N's row
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from snip_megatron.precision import PrecisionMap
from snip_megatron.reporting.sinks import MAP_COLUMNS, PREFIX, WriterSink, map_figures, map_rows


class WandbSink(WriterSink):
    """A sink that writes to ``writer``, the ``wandb`` module with an open run or a run object. None disables it."""

    name = "wandb"

    def __init__(self, writer: Any) -> None:
        super().__init__(writer)
        self._iteration = 0

    def begin_step(self, step: int) -> None:
        """Note the begin of training step ``step``. Later rows have at least iteration ``step``."""
        self._iteration = max(self._iteration, int(step))

    def _write(self, iteration: int, figures: Mapping[str, Any]) -> None:
        self.begin_step(iteration)
        if figures:
            self._writer.log(dict(figures), step=self._iteration)

    def _write_map(self, iteration: int, precision_map: PrecisionMap, linears: Sequence[str]) -> None:
        import wandb  # a writer exists, so it is installed; optional otherwise

        rows = map_rows(precision_map, linears)
        table = wandb.Table(columns=list(MAP_COLUMNS), data=rows)
        self._write(iteration, {f"{PREFIX}map": table} | map_figures(precision_map, rows))

"""SNIP's figures in Megatron's own wandb run: never a second run, never a reason for training to stop.

Megatron opens its wandb run on the **last** rank and hands it out as ``get_wandb_writer()``: the ``wandb`` module
there, None elsewhere or when wandb is off. The run directory lives on rank 0: what the sink should show has to be known
on the last rank, which the map and the loss are.

Rows carry Megatron's iteration (steps completed) as wandb's step, so that the panels line up with its ``lm loss``.
wandb drops rows below its current step and asking for it is a round trip of up to 30 s, so the caller says it:

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
    """Writes into ``writer`` (the ``wandb`` module with an open run, or a run object); None makes it a no-op."""

    name = "wandb"

    def __init__(self, writer: Any) -> None:
        super().__init__(writer)
        self._iteration = 0

    def begin_step(self, step: int) -> None:
        """Training step ``step`` begins: nothing is written below iteration ``step`` from now on."""
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

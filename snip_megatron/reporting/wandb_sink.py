"""SNIP's figures in Megatron's own wandb run: never a second run, never a reason for training to stop.

Megatron opens its wandb run on the **last** rank and hands it out as ``get_wandb_writer()``: the ``wandb`` module
there, None elsewhere or when wandb is off. The run directory lives on rank 0: what the sink should show has to be known
on the last rank, which the map and the loss are.

Rows carry Megatron's iteration (steps completed) as wandb's step, so that the panels line up with its ``lm loss``: the
metrics of the 0-based training step N belong to iteration N + 1, events before ``train_step(N)`` to iteration N. wandb
drops rows below its current step and asking it for that step is a round trip of up to 30 s, so the caller says it:

    sink = WandbSink(get_wandb_writer())
    sink.begin_step(N)                     # at the start of every train_step(N): Megatron has logged up to iteration N
    sink.metric(N - 1, fp4_fraction=0.75)  # late figures join iteration N's row
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from snip_megatron.precision import Gemm, PrecisionMap
from snip_megatron.reporting.storage import jsonable

PREFIX = "snip/"
GIVE_UP_AFTER = 3
"""Failures in a row after which the sink falls silent: each one may cost the training thread a time-out."""


class WandbSink:
    """Writes into ``writer`` (the ``wandb`` module with an open run, or a run object); None makes it a no-op.

    No method raises: a failure is remembered in ``last_error`` and said once on standard error.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._failures = 0
        self._iteration = 0
        self.last_error: str | None = None

    def begin_step(self, step: int) -> None:
        """Training step ``step`` begins: nothing is written below iteration ``step`` from now on."""
        self._iteration = max(self._iteration, int(step))

    @property
    def active(self) -> bool:
        """Whether figures are still sent."""
        return self._writer is not None and self._failures < GIVE_UP_AFTER

    def metric(self, step: int, /, **figures: float | None) -> None:
        """Figures of training step ``step``, as ``snip/<name>``. None, NaN and Inf are left out."""
        self._send(step + 1, lambda: _figures("", figures))

    def event(self, step: int, kind: str, /, **fields: Any) -> None:
        """The numbers of an event before training step ``step``, as ``snip/<kind>/<field>``.

        Numbers in a mapping (``achieved_per_stage``) become ``snip/<kind>/<field>/<key>``. A text field ``kind`` (of a
        probe) joins the name, so that the probes of one step stay apart; other texts are left out.
        """
        name = f"{kind}/{fields['kind']}" if isinstance(fields.get("kind"), str) else kind
        self._send(step, lambda: _figures(f"{name}/", fields) | {f"{PREFIX}{name}/happened": 1})

    def precision_map(self, step: int, precision_map: PrecisionMap, linears: Iterable[str] | None = None) -> None:
        """The map adopted before training step ``step`` as the table ``snip/map``, one row a linear."""
        names = [str(name) for name in (precision_map.linears() if linears is None else linears)]
        self._send(step, lambda: {f"{PREFIX}map": _table(precision_map, names)})

    def _send(self, iteration: int, row: Callable[[], Mapping[str, Any]]) -> None:
        if not self.active:
            return
        self.begin_step(iteration)
        # wandb raises whatever its service, its network or its file system raises; none of it may reach training.
        try:
            if data := row():
                self._writer.log(dict(data), step=self._iteration)
            self._failures = 0
        except Exception as error:
            self._failures += 1
            if self.last_error is None:
                with contextlib.suppress(OSError, ValueError):
                    print(f"snip: wandb: {error}; training goes on without these figures", file=sys.stderr, flush=True)
            self.last_error = f"{type(error).__name__}: {error}"


def _figures(prefix: str, fields: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in fields.items():
        plain = jsonable(value)
        if isinstance(plain, dict):
            found |= _figures(f"{prefix}{name}/", plain)
        elif isinstance(plain, (int, float)) and not isinstance(plain, bool) and math.isfinite(plain):
            found[f"{PREFIX}{prefix}{name}"] = plain
    return found


def _table(precision_map: PrecisionMap, linears: Iterable[str]) -> Any:
    import wandb  # a writer exists, so it is installed; optional otherwise

    rows = [[name, *(precision_map.format_of(name, gemm).value for gemm in Gemm)] for name in linears]
    return wandb.Table(columns=["linear", *(gemm.value for gemm in Gemm)], data=rows)

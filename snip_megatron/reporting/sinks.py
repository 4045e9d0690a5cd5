"""SNIP's figures in Megatron's own loggers, its wandb run and its TensorBoard log.

Megatron opens both on the last rank, and its writers are None on all other ranks. They therefore show only what the
last rank knows, such as the map and the loss. Rank 0 writes the run directory.

Loggers count iterations (completed steps). The metrics of the 0-based training step N belong to iteration N + 1, and
events before ``train_step(N)`` to iteration N. A logger that fails never stops training: its first failure is printed,
and after a few failures in a row nothing more is written to it.
"""

import contextlib
import math
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from snip_megatron.precision import Gemm, PrecisionMap
from snip_megatron.runtime.storage import jsonable

PREFIX = "snip/"
MAX_FAILURES = 3
"""Number of failures in a row after which a logger is not used again. Each may cost the training thread a time-out."""
MAP_COLUMNS = ("linear", *(gemm.value for gemm in Gemm))

Rows = Sequence[Sequence[str]]
"""A map as a table: the columns of :data:`MAP_COLUMNS` for each linear."""


class Sinks:
    """The loggers of a run, as a :class:`snip_megatron.runtime.host.Sink`.

    Args:
        wandb: the module ``wandb`` with an open run, or a run object. None if wandb is off.
        tensorboard: a ``SummaryWriter``. None if TensorBoard is off.
    """

    def __init__(self, *, wandb: Any = None, tensorboard: Any = None) -> None:
        self.loggers: tuple[Logger, ...] = (Wandb(wandb), TensorBoard(tensorboard))

    def begin_step(self, step: int) -> None:
        for logger in self.loggers:
            logger.iteration = max(logger.iteration, int(step))

    def metric(self, step: int, /, **figures: float | None) -> None:
        """Write the figures of training step ``step`` as ``snip/<name>``. None, NaN and Inf are left out."""
        self._send(step + 1, scalars("", figures))

    def event(self, step: int, kind: str, /, **fields: Any) -> None:
        """Write the numbers of an event before training step ``step`` as ``snip/<kind>/<field>``.

        Numbers in a mapping (``achieved_per_stage``) become ``snip/<kind>/<field>/<key>``. The text field ``kind`` of a
        probe and ``formats`` of a validation become part of the name, because one step may have several of them.
        """
        name = "/".join([kind, *(fields[field] for field in ("kind", "formats") if isinstance(fields.get(field), str))])
        self._send(step, scalars(f"{name}/", fields) | {f"{PREFIX}{name}/happened": 1})

    def precision_map(self, step: int, precision_map: PrecisionMap, linears: Iterable[str] | None = None) -> None:
        """Write the map that is adopted before training step ``step`` as the table ``snip/map``, one row a linear.

        Also writes ``snip/gemms/<format>``, the number of GEMMs in each format, and ``snip/solve/seconds``, the solving
        time, if the solver made the map.
        """
        names = [str(name) for name in (precision_map.linears() if linears is None else linears)]
        rows = [[name, *(fmt.value for fmt in precision_map.formats_of(name))] for name in names]
        counts = Counter(fmt for _, *formats in rows for fmt in formats)
        self._send(step, scalars("", {"gemms": dict(counts), "solve": {"seconds": precision_map.solve_seconds}}), rows)

    def _send(self, iteration: int, figures: Mapping[str, float], rows: Rows = ()) -> None:
        for logger in self.loggers:
            logger.send(iteration, figures, rows)


class Logger(ABC):
    """A logger with the ``writer`` of Megatron. If ``writer`` is None, nothing is written."""

    name = ""

    def __init__(self, writer: Any) -> None:
        self.writer = writer
        self.iteration = 0
        self._failures = 0
        self._reported = False

    def send(self, iteration: int, figures: Mapping[str, float], rows: Rows) -> None:
        """Write figures, and a map if ``rows`` is not empty. Never raises. The first failure is printed."""
        if self.writer is None or self._failures == MAX_FAILURES:
            return
        # A logger may raise any error of its service, network or file system. None may reach the training loop.
        try:
            self._write(iteration, figures, rows)
            self._failures = 0
        except Exception as error:
            self._failures += 1
            if not self._reported:
                self._reported = True
                line = f"snip: {self.name}: {error}; training goes on without these figures"
                with contextlib.suppress(OSError, ValueError):  # standard error is closed
                    print(line, file=sys.stderr, flush=True)

    @abstractmethod
    def _write(self, iteration: int, figures: Mapping[str, float], rows: Rows) -> None:
        """Write. May raise."""


class TensorBoard(Logger):
    """A ``SummaryWriter``, which accepts figures in any order of iterations."""

    name = "TensorBoard"

    def _write(self, iteration: int, figures: Mapping[str, float], rows: Rows) -> None:
        if rows:
            lines = [MAP_COLUMNS, ["---"] * len(MAP_COLUMNS), *rows]
            self.writer.add_text(f"{PREFIX}map", "\n".join(f"| {' | '.join(line)} |" for line in lines), iteration)
        for name, value in figures.items():
            self.writer.add_scalar(name, value, iteration)


class Wandb(Logger):
    """A wandb run. Its rows have Megatron's iteration as wandb's step, so that the panels line up with ``lm loss``.

    wandb drops rows below its current step, and reading that step may take up to 30 s. ``iteration`` therefore follows
    it: at the start of ``train_step(N)`` Megatron has logged up to iteration N. Late figures join that row.
    """

    name = "wandb"

    def _write(self, iteration: int, figures: Mapping[str, float], rows: Rows) -> None:
        self.iteration = max(self.iteration, iteration)
        values: dict[str, Any] = dict(figures)
        if rows:
            import wandb  # an optional package, installed if there is a writer

            values[f"{PREFIX}map"] = wandb.Table(columns=list(MAP_COLUMNS), data=list(rows))
        if values:
            self.writer.log(values, step=self.iteration)


def scalars(prefix: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of ``fields`` by their logged name. Nested mappings become further levels."""
    numbers: dict[str, float] = {}
    for name, value in fields.items():
        plain = jsonable(value)
        if isinstance(plain, dict):
            numbers |= scalars(f"{prefix}{name}/", plain)
        elif isinstance(plain, (int, float)) and not isinstance(plain, bool) and math.isfinite(plain):
            numbers[f"{PREFIX}{prefix}{name}"] = plain
    return numbers

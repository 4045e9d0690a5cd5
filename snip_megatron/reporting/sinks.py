"""SNIP's figures in Megatron's own loggers, its wandb run and its TensorBoard log.

Megatron opens both on the last rank, and its writers are None on all other ranks. They therefore show only what the
last rank knows, such as the map and the loss. Rank 0 writes the run directory.

Loggers count iterations (completed steps). The metrics of the 0-based training step N belong to iteration N + 1, and
events before ``train_step(N)`` to iteration N. A logger that fails never stops training: its first failure is printed,
and after a few failures in a row nothing more is written to it.

Both loggers group panels by what stands before the first ``/`` of a name: ``snip`` has the figures of a step,
``snip-map`` those of maps, ``snip-updates`` and ``snip-faults`` those of other events, and ``snip-bits`` has a panel
for each linear. ΔL and ΔW of linears stand among Megatron's own tensor metrics, ``tensor-metrics/<metric>/<name>``. The
loggers of a job that has started nvdlfw_inspect, to which Transformer Engine writes, get them as ``<linear>_<metric>``.
"""

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from snip_megatron.precision import Formats, Gemm, LinearId, PrecisionMap
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.run_data import FAULT_EVENTS
from snip_megatron.runtime.storage import jsonable
from snip_megatron.sensitivity.policies import divergences
from snip_megatron.sensitivity.table import StatisticsTable

MAX_FAILURES = 3
"""Number of failures in a row after which a logger is not used again. Each may cost the training thread a time-out."""


Write = Callable[[int, Mapping[str, float], Sequence[Sequence[str]]], None]
"""Writes figures of an iteration, and the map as a table of texts, whose first row has the names of its columns."""

_TABLE = "snip-map/by_layer"
_TENSORS = "tensor-metrics"


class Sinks:
    """The loggers of a run, as a :class:`snip_megatron.runtime.host.Sink`.

    Args:
        wandb: the module ``wandb`` with an open run, or a run object. None if wandb is off.
        tensorboard: a ``SummaryWriter``. None if TensorBoard is off.
    """

    def __init__(self, *, wandb: Any = None, tensorboard: Any = None) -> None:
        self._wandb, self._tensorboard, self._inspect = wandb, tensorboard, _inspect_logger()
        writes: dict[str, tuple[Any, Write]] = {
            "wandb": (wandb, self._write_to_wandb),
            "TensorBoard": (tensorboard, self._write_to_tensorboard),
            "nvdlfw_inspect": (self._inspect, self._write_to_inspect),
        }
        self._writes = {name: write for name, (writer, write) in writes.items() if writer is not None}
        self._failures: Counter[str] = Counter()  # in a row
        self._reported: set[str] = set()
        self._iteration = 0  # of wandb

    def begin_step(self, step: int) -> None:
        self._iteration = max(self._iteration, step)

    def metric(self, step: int, /, **figures: float | None) -> None:
        """Write the figures of training step ``step`` as ``snip/<name>``. None, NaN and Inf are left out."""
        self._send(step + 1, scalars("snip", figures))

    def event(self, step: int, kind: str, /, **fields: Any) -> None:
        """Write the numbers of an event before training step ``step`` as ``<group>/<kind>/<field>``.

        Those of an adoption are ``snip-map/<field>``. Numbers in a mapping (``achieved_per_stage``) become
        ``…/<field>/<key>``. The text field ``kind`` of a probe and ``formats`` of a validation become part of the name,
        because one step may have several of them.
        """
        names = [kind, *(fields[field] for field in ("kind", "formats") if isinstance(fields.get(field), str))]
        group = "snip-faults" if kind in FAULT_EVENTS else "snip-updates"
        name = "snip-map" if kind == "adopt" else "/".join([group, *names])
        self._send(step, scalars(name, fields) | {f"{name}/happened": 1})

    def statistics(self, step: int, table: StatisticsTable, config: SnipConfig) -> None:
        """Write ΔL and ΔW of each linear, over its GEMMs in the costliest candidate format, before step ``step``."""
        if not self._writes:
            return
        names = [str(row.id) for row in table.linears]
        with contextlib.suppress(Exception):  # the solver meets the same error, and says so
            for group, values in zip(("delta-loss", "delta-weight"), divergences(table, config.request()), strict=True):
                costliest = values.max(axis=-1).sum(axis=-1)
                if costliest.any():  # an estimator without ΔW has zeros
                    self._send(
                        step, scalars(f"{_TENSORS}/snip-{group}", dict(zip(names, costliest.tolist(), strict=True)))
                    )

    def precision_map(self, step: int, precision_map: PrecisionMap, linears: Iterable[str] | None = None) -> None:
        """Write the map that is adopted before training step ``step`` as the table ``snip-map/by_layer``.

        Also writes ``snip-map/gemms/<format>``, the number of GEMMs in each format, ``snip-map/solve_seconds``, if the
        solver made the map, and ``snip-bits/<linear>``, the mean bits of a linear's GEMMs.
        """
        chosen = precision_map.linears() if linears is None else map(LinearId.parse, linears)
        formats = {linear: precision_map.formats_of(str(linear)) for linear in chosen}
        counts = Counter(fmt.value for of_gemms in formats.values() for fmt in of_gemms)
        bits = {panel(each): sum(fmt.bits for fmt in of_gemms) / len(Gemm) for each, of_gemms in formats.items()}
        figures = {"gemms": dict(counts), "solve_seconds": precision_map.solve_seconds}
        self._send(step, scalars("snip-map", figures) | scalars("snip-bits", bits), by_layer(formats))

    def _send(self, iteration: int, figures: Mapping[str, float], table: Sequence[Sequence[str]] = ()) -> None:
        for name, write in self._writes.items():
            if self._failures[name] == MAX_FAILURES:
                continue
            # A logger may raise any error of its service, network or file system. None may reach the training loop.
            try:
                write(iteration, figures, table)
                self._failures[name] = 0
            except Exception as error:
                self._failures[name] += 1
                if name not in self._reported:
                    self._reported.add(name)
                    with contextlib.suppress(OSError, ValueError):  # standard error is closed
                        line = f"snip: {name}: {error}; training goes on without these figures"
                        print(line, file=sys.stderr, flush=True)

    def _write_to_tensorboard(
        self, iteration: int, figures: Mapping[str, float], table: Sequence[Sequence[str]]
    ) -> None:
        if table:
            lines = [table[0], ["---"] * len(table[0]), *table[1:]]
            self._tensorboard.add_text(_TABLE, "\n".join(f"| {' | '.join(line)} |" for line in lines), iteration)
        for name, value in figures.items():
            self._tensorboard.add_scalar(name, value, iteration)

    def _write_to_inspect(self, iteration: int, figures: Mapping[str, float], _: Sequence[Sequence[str]]) -> None:
        for name, value in figures.items():
            group, *metric_and_linear = name.split("/")
            if group == _TENSORS:
                metric, linear = metric_and_linear
                self._inspect.log_scalar(f"{linear}_{metric.replace('-', '_')}", value, iteration)

    def _write_to_wandb(self, iteration: int, figures: Mapping[str, float], table: Sequence[Sequence[str]]) -> None:
        """Write a row with Megatron's iteration as wandb's step, so that the panels line up with ``lm loss``.

        wandb drops rows below its current step, and reading that step may take up to 30 s. ``_iteration`` therefore
        follows it: at the start of ``train_step(N)`` Megatron has logged up to iteration N. Late figures join that row.
        """
        self._iteration = max(self._iteration, iteration)
        values: dict[str, Any] = dict(figures)
        if table:
            import wandb  # an optional package, installed if there is a writer

            values[_TABLE] = wandb.Table(columns=list(table[0]), data=[list(row) for row in table[1:]])
        if values:
            self._wandb.log(values, step=self._iteration)


def _inspect_logger() -> Any:
    """Return what Transformer Engine's debug features log to. None if the job has not started nvdlfw_inspect."""
    logging = sys.modules.get("nvdlfw_inspect.logging")
    return logging.MetricLogger if logging is not None and logging.MetricLogger.enabled_loggers else None


def panel(linear: LinearId) -> str:
    """Return the name of a linear in the loggers, by kind and layer, such as ``mlp.linear_fc1/007``."""
    stack = "" if linear.stack == "decoder" else f"{linear.stack}."
    return f"{stack}{linear.path}/{linear.layer:03}"


def by_layer(formats: Mapping[LinearId, Formats]) -> list[list[str]]:
    """Return a map as a table: names of columns, and for each layer the formats of fprop, dgrad and wgrad."""
    layers = dict.fromkeys((linear.stack, linear.layer) for linear in formats)
    kinds = dict.fromkeys(linear.path for linear in formats)
    rows = [
        [
            f"{layer}" if stack == "decoder" else f"{stack} {layer}",
            *(_cell(formats.get(LinearId(stack, layer, path))) for path in kinds),
        ]
        for stack, layer in layers
    ]
    return [["layer", *kinds], *rows]


def _cell(formats: Formats | None) -> str:
    """Return the formats of three GEMMs in one cell: once if they are equal. Empty if the layer has no such linear."""
    names = [fmt.value for fmt in formats or ()]
    return names[0] if len(set(names)) == 1 else " ".join(names)


def scalars(prefix: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of ``fields`` as ``<prefix>/<name>``. Nested mappings become further levels."""
    numbers: dict[str, float] = {}
    for name, value in fields.items():
        plain = jsonable(value)
        if isinstance(plain, dict):
            numbers |= scalars(f"{prefix}/{name}", plain)
        elif isinstance(plain, (int, float)) and not isinstance(plain, bool) and math.isfinite(plain):
            numbers[f"{prefix}/{name}"] = plain
    return numbers

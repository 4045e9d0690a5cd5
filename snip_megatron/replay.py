"""What a run stored, as Problems: another budget, policy or estimator over the statistics it measured.

A run directory keeps, by step, the statistics (``stats/step_N.npz``) and the Problem made of them
(``problems/step_N.json``), and in ``config.json`` the request behind both. A change of the budget's figure needs the
Problem alone; any other change makes a new Problem from the statistics, in the way the run does.
"""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format, PrecisionMap, fp4_fraction
from snip_megatron.reporting.readers import CONFIG, STEP_FILES, read_config, step_of
from snip_megatron.sensitivity.problem import build_problem
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.sensitivity.times import OptionTimes
from snip_megatron.solver.costs import LinearShape, load_cost_model
from snip_megatron.solver.problem import Budget, Problem
from snip_megatron.statistics.table import StatisticsTable


@dataclass(frozen=True)
class Stored:
    """One update of a run directory.

    Attributes:
        run: the directory. step: the training step before which was measured.
    """

    run: Path
    step: int

    def path(self, folder: str) -> Path:
        """The step's file in ``folder``, whether it exists or not."""
        return self.run / folder / f"step_{self.step}{STEP_FILES[folder]}"

    def problem(self) -> Problem:
        """The Problem that the run solved. Raises SnipError."""
        path = self.path("problems")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise SnipError(f"{path}: cannot be read: {error.strerror}") from None
        return Problem.from_json(content, where=str(path))

    def table(self) -> StatisticsTable:
        """The statistics. Raises SnipError."""
        return StatisticsTable.load(self.path("stats"))

    def request(self) -> SolveRequest:
        """What the run asks of every update. Raises SnipError."""
        return SolveRequest.from_dict(self._fact("request"), f"{self.run / CONFIG}: facts.request")

    def times(self, cost: str, formats: tuple[str, ...]) -> OptionTimes:
        """Times of the run's shapes by the cost model ``cost`` (a device's table, a file, ``flops``)."""
        body = self._fact("linear_shapes")
        try:
            shapes = {str(name): LinearShape(**fields) for name, fields in body.items()}
        except (TypeError, AttributeError) as error:
            raise SnipError(f"{self.run / CONFIG}: facts.linear_shapes: {error}") from None
        return OptionTimes.predict(load_cost_model(cost), shapes, [Format(f) for f in formats])

    def with_fp4_share(self, precision_map: PrecisionMap) -> PrecisionMap:
        """A map asked for by time or loss, with its share of FLOPs in fp4 where the statistics' shapes are at hand."""
        if precision_map.budget is None or not self.path("stats").exists():
            return precision_map
        flops = {row.name: row.flops for row in self.table().linears}
        return precision_map.with_fields(fp4_share=fp4_fraction(precision_map, flops))

    def _fact(self, name: str) -> Any:
        facts = read_config(self.run)["facts"]
        if name not in facts:
            raise SnipError(f"{self.run / CONFIG}: facts.{name}: missing; an earlier version wrote this run")
        return facts[name]


@dataclass(frozen=True)
class Change:
    """What is asked instead of what the run asked.

    Attributes:
        fields: of SolveRequest, such as policy, estimator, q, formats, pins.
        cost: cost model of a ``speedup`` or ``loss`` budget; None: the run's times.
    """

    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    cost: str | None = None

    def __bool__(self) -> bool:
        return bool(self.fields) or self.cost is not None


def find_stored(source: Path, step: int | None) -> Stored | None:
    """The update that ``source`` names: a run directory (its latest, or ``step``), or a step's file inside of one.

    None for a file that lies in no run directory. Raises SnipError where nothing is stored.
    """
    if source.is_dir():
        read_config(source)  # a directory of something else is refused here
        steps = _steps(source)
        if not steps:
            raise SnipError(f"{source}: no problem or statistics are stored there; the run made no update")
        if step is not None and step not in steps:
            raise SnipError(f"--step {step}: {source} has an update at {', '.join(map(str, steps))}")
        return Stored(source, steps[-1] if step is None else step)
    if step is not None:
        raise SnipError(f"--step {step}: {source} is one step's file; give the run directory")
    folder, run = source.parent.name, source.absolute().parent.parent
    if folder in ("problems", "stats") and (run / CONFIG).is_file():
        found = step_of(source, STEP_FILES[folder])
        if found is not None:
            return Stored(source.parent.parent, found)
    return None


def _steps(run: Path) -> list[int]:
    found = set()
    for folder in ("problems", "stats"):
        for path in (run / folder).glob("step_*"):
            step = step_of(path, STEP_FILES[folder])
            if step is not None:
                found.add(step)
    return sorted(found)


def is_statistics(path: Path) -> bool:
    """Whether a file is a ``stats/step_N.npz``, by its content."""
    return path.is_file() and zipfile.is_zipfile(path)


def rebuild(stored: Stored, change: Change, budget: Budget | None) -> Problem:
    """A new Problem from the stored statistics. Raises SnipError on what the statistics or times do not hold.

    ``budget``: its kind and figure; None: the run's own.
    """
    request = stored.request()
    budget = budget or request.budget
    wanted: dict[str, Any] = {"speedup": budget.speedup, "loss": budget.loss}
    if budget.target is not None:
        wanted["target"] = budget.target
    fields = dict(change.fields)
    if budget.kind == "target" and "formats" not in fields:
        # bf16 costs nothing under a share of FLOPs: it is a candidate of the other budgets only.
        fields["formats"] = tuple(f for f in request.formats if f != Format.BF16.value)
    request = dataclasses.replace(request, **wanted, **fields)
    if budget.kind == "target" and Format.BF16.value in request.formats:
        raise SnipError(f"--formats {','.join(request.formats)}: bf16 is no candidate under fp4=: pin it instead")
    if request.timed and (request.unquantised_flops or request.unquantised_stage_flops):
        raise SnipError(
            f"{stored.run}: times of its grouped and shared experts are not predicted; a budget of this run is a share"
            " of FLOPs (fp4=)"
        )
    if request.timed and (change.cost is not None or request.times is None):
        if change.cost is None:
            raise SnipError(
                f"{stored.run}: its budget was a share of FLOPs and no times are stored; give --cost, such as h200,"
                " flops or a file of snip calibrate"
            )
        formats = (*request.formats, *(fmt for _, fmt in request.pins))
        request = dataclasses.replace(request, times=stored.times(change.cost, formats))
    return build_problem(stored.table(), request)[0]

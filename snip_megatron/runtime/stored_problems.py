"""New Problems from a stored run: another budget, policy or estimator over the statistics that the run measured.

For each update, a run directory has the statistics (``stats/step_N.npz``) and the Problem that was built from them
(``problems/step_N.json``). ``config.json`` has the solve request of the run. Another value of the same budget needs
only the Problem. Any other change builds a new Problem of one map from the statistics.
"""

import dataclasses
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snip_megatron.precision import FOUR_BIT, Format, PrecisionMap, fp4_fraction
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError, plain_arguments
from snip_megatron.precision.strict_json import read_file
from snip_megatron.runtime.config import candidates
from snip_megatron.runtime.run_data import CONFIG, STEP_FILES, read_config, step_files, step_of, step_path
from snip_megatron.sensitivity.problem import build_problem
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.sensitivity.table import StatisticsTable
from snip_megatron.sensitivity.times import OptionTimes
from snip_megatron.solver.problem import Problem
from snip_megatron.timing.cost_model import LinearShape, load_cost_model


@dataclass(frozen=True)
class StoredUpdate:
    """The update of a run directory whose statistics were measured before a training step."""

    run: Path
    step: int

    def path(self, folder: str) -> Path:
        """Return the path of the update's file in ``folder``, which need not exist."""
        return step_path(self.run, folder, self.step)

    def problem(self) -> Problem:
        """Return the problem that the run solved. Raises SnipError if it cannot be read."""
        path = self.path("problems")
        return Problem.from_json(read_file(path), where=str(path))

    def table(self) -> StatisticsTable:
        """Return the statistics. Raises SnipError if they cannot be read."""
        return StatisticsTable.load(self.path("stats"))

    def request(self) -> SolveRequest:
        """Return the request with which the run solved its updates. Raises SnipError if it is missing or invalid."""
        return SolveRequest.from_dict(self._fact("request"), f"{self.run / CONFIG}: facts.request")

    def times(self) -> OptionTimes:
        """Return the stored times of the run's linears. Raises SnipError if there are none, or they are broken."""
        body = self._fact("request").get("times") or self._fact("predicted_times")
        if body is None:
            raise SnipError(
                f"{self.run}: its budget was a share of FLOPs and no times are stored; a training with --snip-budget"
                " speedup= or loss= times its linears"
            )
        return OptionTimes.from_dict(body, f"{self.run / CONFIG}: predicted times")

    def predicted_times(self, timings: str) -> OptionTimes:
        """Return the times that a table predicts for the run's linears. Raises SnipError if either is not known."""
        if not (shapes := self._fact("linear_shapes")):
            raise SnipError(f"{self.run / CONFIG}: facts.linear_shapes: not known, which --timings needs")
        model = load_cost_model(timings)
        by_kind = {kind: LinearShape(**shape) for kind, shape in shapes.items()}
        return OptionTimes.predict(model, by_kind, map(Format, model.formats))

    def with_fp4_share(self, precision_map: PrecisionMap) -> PrecisionMap:
        """Return the map with its fp4 share of FLOPs, if that was not the budget and the run stores statistics."""
        if precision_map.budget is None or not self.path("stats").exists():
            return precision_map
        flops = {row.name: row.flops for row in self.table().linears}
        return dataclasses.replace(precision_map, fp4_share=fp4_fraction(precision_map, flops))

    def _fact(self, name: str) -> Any:
        facts = read_config(self.run)["facts"]
        if name not in facts:
            raise SnipError(f"{self.run / CONFIG}: facts.{name}: missing")
        return facts[name]


def find_stored(source: Path, step: int | None) -> StoredUpdate | None:
    """Return a stored update. None if ``source`` is a file outside of a run directory.

    ``source`` is a run directory, or a file in its folders ``problems`` and ``stats``. In a run directory, ``step``
    chooses the update, by default the latest one. Raises SnipError if there is no such update.
    """
    if os.path.isdir(source):
        read_config(source)  # a directory of something else is refused here
        steps = sorted({step for folder in ("problems", "stats") for step in step_files(source, folder)})
        if not steps:
            raise SnipError(f"{source}: no problem or statistics are stored there; the run made no update")
        if step is not None and step not in steps:
            raise SnipError(f"--step {step}: {source} has an update at {', '.join(map(str, steps))}")
        return StoredUpdate(source, steps[-1] if step is None else step)
    if step is not None:
        raise SnipError(f"--step {step}: {source} is one step's file; give the run directory")
    folder, run = source.parent.name, source.absolute().parent.parent
    if folder in ("problems", "stats") and (run / CONFIG).is_file():
        step = step_of(source, STEP_FILES[folder])
        if step is not None:
            return StoredUpdate(source.parent.parent, step)
    return None


def is_statistics(path: Path) -> bool:
    """Return whether the content of a file is that of a ``stats/step_N.npz``."""
    return os.path.isfile(path) and zipfile.is_zipfile(path)


def rebuild(
    stored: StoredUpdate, fields: Mapping[str, Any], budget: Budget | None, timings: str | None = None
) -> Problem:
    """Build a new problem of one map from stored statistics. The run may have had phases.

    ``fields`` replace fields of the run's request. ``budget`` is None for the run's own, and ``timings``, the name of a
    table of times, for the run's own times. Raises SnipError if the statistics or the stored times lack what the new
    request needs.
    """
    request = stored.request()
    budget, fields = budget or request.budget, dict(fields)
    if budget.timed != request.budget.timed and "formats" not in fields:
        fields["formats"] = _candidates(stored, request, budget)
    with plain_arguments():
        request = dataclasses.replace(request, budget=budget, **fields)
    if not budget.timed and budget.value > 0 and not FOUR_BIT.intersection(request.formats):
        raise SnipError(
            f"{stored.run}: {','.join(request.formats)}: none has four bits, so --budget {budget} cannot be reached;"
            " a run with --snip-formats fp8,fp4 measures fp4"
        )
    if timings is not None and not budget.timed:
        raise SnipError(f"--timings {timings} has no effect with --budget {budget}; use speedup= or loss=")
    if budget.timed and request.unquantised_stage_flops:
        raise SnipError(
            f"{stored.run}: times of its linears that stay bf16 are not predicted; a budget of this run is a share"
            " of FLOPs (fp4=)"
        )
    if budget.timed:
        request = dataclasses.replace(
            request, times=stored.times() if timings is None else stored.predicted_times(timings)
        )
    table = stored.table()
    with plain_arguments():
        return build_problem(table, request)[0]


def _candidates(stored: StoredUpdate, request: SolveRequest, budget: Budget) -> tuple[str, ...]:
    """Return the candidates of a training with this budget that the run has measured.

    Under a share of FLOPs, and if the run has measured none of them, they are the run's candidates without bf16.
    """
    measured = tuple(fmt for fmt in request.formats if fmt != Format.BF16.value)
    if budget.kind == "fp4":
        return measured
    backend = read_config(stored.run)["facts"].get("gemm_backend")
    formats = tuple(fmt for fmt in candidates(budget.kind, backend) if fmt in (*measured, Format.BF16.value))
    return formats if set(measured) & set(formats) else measured

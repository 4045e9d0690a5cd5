"""The work of rank 0: the solver process, the run directory and the lines in the log. Nothing here stops training."""

import contextlib
import dataclasses
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from snip_megatron.precision import LinearRow, PrecisionMap, fp4_fraction
from snip_megatron.precision.errors import SnipError, first_line
from snip_megatron.precision.phases import PlanPhase, PrecisionPlan
from snip_megatron.runtime.account import Account
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.exchange import StepFigures
from snip_megatron.runtime.run_data import blame_command, read_events, read_metrics, replayed_maps
from snip_megatron.runtime.run_directory import RunDirectory
from snip_megatron.runtime.solving import Candidate, SidecarClient, SidecarResult, SolveJob, SolverInProcess
from snip_megatron.sensitivity.policies import fixed_map
from snip_megatron.sensitivity.request import PhasedRequest, SolveRequest
from snip_megatron.sensitivity.table import StatisticsTable
from snip_megatron.sensitivity.times import OptionTimes

_POLL_S = 0.01
_SILENCE_S = 2.0  # seconds of waiting after which rank 0 says so


@dataclass(eq=False)
class RankZeroCoordinator:
    """Rank 0's side of updates: it submits them to the solver, and writes the run directory."""

    config: SnipConfig
    request: SolveRequest  # the solve request of all updates, without its version
    linears: tuple[LinearRow, ...]  # of the whole model
    static_map: PrecisionMap | None  # the checked map of ``--snip-map``. None if there is none
    run: RunDirectory | None  # None if the run has none
    # the tokens of a step to which ``request`` refers. None if its FLOPs do not depend on them
    tokens_per_step: int | None = None
    finished: Callable[[Path], None] | None = None  # called with the path of the run directory after its last record
    # why step times under maps are not compared with those in bf16, as the printed line says it. None if they are
    unjudged: str | None = "emulated"
    solver: SolverInProcess | None = None  # what solves updates. None for a solver process
    # measures the times of the run's options before the first update. None if ``request`` has them
    times: Callable[[], OptionTimes] | None = None

    def __post_init__(self) -> None:
        self._flops = {row.name: row.flops for row in self.linears}
        self._stages = {row.name: row.stage for row in self.linears}
        self._account = Account()
        if self.run is not None:  # a record of an earlier job that cannot be read does not end this one
            path = self.run.path
            with contextlib.suppress(SnipError):
                self._account.read(read_events(path), read_metrics(path))
        self._adopted: PrecisionMap | None = None
        self._adopted_at: int | None = None
        self._figures: dict[int, dict[str, Any]] = defaultdict(dict)  # further metrics of steps not recorded yet
        self._news: dict[str, float] | None = None
        # The maps of ``--snip-replay`` by the step of their adoption. They are read now, because a file that is missing
        # later would end the training.
        replay = self.config.replay
        self.replay: Mapping[int, PrecisionMap] = {} if replay is None else replayed_maps(replay)
        self._decisions: dict[int, tuple[Candidate, ...]] = {}
        self._submitted: dict[int, int] = {}
        self._sidecar: SidecarClient | SolverInProcess | None = None
        self._restarts = 0
        if self.config.updates:
            self._sidecar = self.solver or SidecarClient(deadline_s=self.config.deadline)

    # -- updates -----------------------------------------------------------------------------------------------
    def submit(self, step: int, table: StatisticsTable, version: int, phases: PhasedRequest | None = None) -> float:
        """Submit an update to the solver without blocking. With ``phases`` it answers with a plan.

        A table from a checkpoint of another layout is solved for the pipeline stages of this one. Returns the seconds
        for which GEMMs were timed before, which have an event of their own.
        """
        assert self._sidecar is not None
        rows = (dataclasses.replace(row, stage=self._stages.get(row.name, row.stage)) for row in table.linears)
        table = dataclasses.replace(table, linears=tuple(rows))
        self._submitted[version] = step
        if self.run is not None:
            self.run.write("stats", step, table.to_bytes())
        timed = 0.0 if self.times is None else self._timed(step, version, self.times)
        if timed is None:
            return 0.0
        request = dataclasses.replace(self.request, version=version, phases=phases)
        if self.tokens_per_step is not None:
            request = request.of_step(table.tokens_per_step / self.tokens_per_step)
        self._sidecar.submit(SolveJob(table=table, request=request))
        return timed

    def _timed(self, step: int, version: int, measure: Callable[[], OptionTimes]) -> float | None:
        """Measure the times of the run's options. Returns the seconds it took. None if the update is dropped."""
        started = time.perf_counter()
        try:
            self.request = dataclasses.replace(self.request, times=measure())
        except (SnipError, RuntimeError) as error:
            self._drop(step, version, "times", " ".join(str(error).split()), time.perf_counter() - started)
            return None
        self.times = None
        seconds = round(time.perf_counter() - started, 6)
        self.event(step, "times", seconds=seconds, wait_s=seconds)
        if self.run is not None:
            self.run.set_fact("request", self.request.as_dict())
        return seconds

    def receive_results(self, step: int) -> None:
        """Receive the solver's results without blocking."""
        if self.config.is_update_step(step) and not self._account.updates:  # before probes raise the peak
            self._figures[step - 1]["peak_bytes"] = _peak_bytes()
        if self._sidecar is None:
            return
        while (result := self._sidecar.poll()) is not None:
            try:
                self._receive(step, result)
            except Exception as error:  # other ranks wait for this one's decision
                self._drop(step, result.version, "exception", first_line(error), result.latency_s)
        if self._sidecar.restarts > self._restarts:
            self._restarts = self._sidecar.restarts
            reason = self._sidecar.last_error
            self.event(step, "sidecar_restart", restarts=self._restarts, reason=reason)
            print(f"snip: the solver's process was started again ({reason}); the map in force stays", flush=True)

    def decision(self, step: int, version: int) -> tuple[Candidate, ...] | None:
        """Return the candidates of an update, none if it has failed. None if the solver has not answered.

        Waits for the answer for at most ``--snip-wait`` seconds.
        """
        self.receive_results(step)
        started, said = time.monotonic(), False
        while version not in self._decisions and (waited := time.monotonic() - started) < self.config.wait:
            if waited > _SILENCE_S and not said:
                said = True
                print(f"snip: step {step}: waiting for map {version}, at most {self.config.wait:g} s", flush=True)
            time.sleep(_POLL_S)
            self.receive_results(step)
        return self._decisions.pop(version, None)

    def _receive(self, step: int, result: SidecarResult) -> None:
        version = result.version
        if result.failure is not None:
            self._drop(step, version, result.failure, result.message, result.latency_s)
            return
        candidates = tuple(map(self._candidate, result.candidates))
        plan, precision_map = candidates[0].plan, candidates[0].precision_map
        self._decisions[version] = candidates
        if result.out_of_reach is not None and plan is not None:
            budget, reachable = self.request.budget, plan.target
            fields = {"kind": budget.kind, "wanted": budget.value, "reachable": reachable, "why": result.out_of_reach}
            self.event(step, "out_of_reach", version=version, **fields)
            print(
                f"snip: update {version}: after what has been spent, the budget {budget} over the run is out of reach"
                f" ({result.out_of_reach}); planned for {budget.kind}={reachable:g} instead; for more, train longer"
                " (--train-iters), pin less or let more change in the schedule's phases",
                flush=True,
            )
        solved = precision_map if plan is None else plan
        self.event(
            step,
            "solved",
            version=version,
            status=solved.status,
            objective=solved.objective,
            bound=solved.bound,
            achieved=solved.achieved,
            achieved_per_stage=dict(precision_map.achieved_per_stage) if plan is None else {},
            **precision_map.prediction(),
            solve_seconds=precision_map.solve_seconds,
            latency_s=result.latency_s,
        )
        if self.run is not None:
            submitted = self._submitted.pop(version, step)
            self.run.write("problems", submitted, result.problem_json or "")
            self.run.write_scores(submitted, result.scores, version=version)

    def _drop(self, step: int, version: int, reason: str, message: str, seconds: float) -> None:
        self._decisions[version] = ()
        self.event(step, "solve_failed", version=version, reason=reason, message=message, latency_s=seconds)
        print(f"snip: update {version}: {message}; the map in force stays", flush=True)

    def _candidate(self, candidate: Candidate) -> Candidate:
        """Return a candidate with the predictions of its maps. Raises ValueError for NaN, before a rank adopts it."""
        plan, precision_map = candidate.plan, self._with_predictions(candidate.precision_map)
        if plan is not None:
            phases = (PlanPhase(each.begin, self._with_predictions(each.precision_map)) for each in plan.phases)
            plan = dataclasses.replace(plan, phases=tuple(phases))
        (precision_map if plan is None else plan).to_json()
        return dataclasses.replace(candidate, precision_map=precision_map, plan=plan)

    def _with_predictions(self, precision_map: PrecisionMap) -> PrecisionMap:
        """Add the fp4 share of FLOPs and the speedup of the whole step to a map under a budget of time or loss."""
        if precision_map.budget is None:
            return precision_map
        assert self.request.times is not None
        bf16_s, map_s = self._account.latest_bf16_s, self._account.map_s
        measured = None if self._adopted is None or map_s is None else (self._adopted, map_s)
        speedup = self.request.times.step_speedup(precision_map, self._stages, bf16_s, measured)
        share = fp4_fraction(precision_map, self._flops)
        return dataclasses.replace(precision_map, fp4_share=share, step_speedup=speedup)

    # -- fixed maps --------------------------------------------------------------------------------------------
    def initial_map(self, step: int) -> PrecisionMap | None:
        """Return the map that the configuration fixes from ``step`` on. None if it fixes none.

        ``--snip-map``, a fixed policy or a replayed run fixes a map.
        """
        if self.static_map is not None or self.config.replay is None:
            names, request = [row.name for row in self.linears], self.request
            return self.static_map or fixed_map(self.config.policy, names, request.pins, request.formats)
        past = [adopted for adopted in self.replay if adopted <= step]
        return self.replay[max(past)] if past else None

    # -- record ------------------------------------------------------------------------------------------------
    def event(self, step: int, kind: str, /, **fields: Any) -> None:
        """Record an event; see :meth:`RunDirectory.event`."""
        self._account.event(step, kind, fields)
        if self.run is not None:
            self.run.event(step, kind, **fields)

    def record_step_time(self, step: int, seconds: float) -> None:
        """Record the duration of a training step in seconds. The next events have it."""
        seconds = round(seconds, 6)
        self._account.step(step, seconds)
        self._figures[step]["step_s"] = seconds
        if self.run is not None:
            self.run.step_s = seconds

    def print_line(self, step: int) -> None:
        """Print the line of the host's log interval, and make its figures ready for :meth:`news`."""
        self._figures[step]["peak_bytes"] = _peak_bytes()
        line = self._account.line(unjudged=self.unjudged)
        if line is not None:
            print(line, flush=True)
        self._news = self._account.figures(judged=self.unjudged is None)

    def news(self) -> dict[str, float] | None:
        """Return the figures of the latest :meth:`print_line` once. None afterwards."""
        news, self._news = self._news, None
        return news

    def metric(self, figures: StepFigures, fp4_fraction: float) -> None:
        fields = self._figures.pop(figures.step, {})
        if self.run is not None:
            self.run.metric(figures.step, figures.loss, figures.grad_norm, fp4_fraction, **fields)

    def record_plan(self, step: int, plan: PrecisionPlan) -> None:
        if self.run is not None:
            self.run.write("plans", step, plan.to_json())

    def record_adoption(self, step: int, precision_map: PrecisionMap) -> None:
        self._adopted, self._adopted_at = precision_map, step
        if self.run is not None:
            self.run.write("maps", step, precision_map.to_json())

    def blame_command(self, iteration: int) -> str:
        """Return the command that finds out what is to blame for an iteration under the map in force."""
        if self.run is None:
            return blame_command({}, iteration, Path("<the map in force>"))
        map_file = self.run.path / "maps" / f"step_{self._adopted_at}.json"
        return blame_command(self.run.facts, iteration, None if self._adopted_at is None else map_file)

    def close(self) -> None:
        """End the solver, close the run directory and call ``finished``."""
        if self._sidecar is not None:
            self._sidecar.close()
            self._sidecar = None
        if self.run is None:
            return
        run, self.run = self.run, None
        run.close(self.finished)


def _peak_bytes() -> int:
    """Return the peak of this process's memory in bytes: GPU memory, or resident memory without a GPU."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

"""Rank 0's duties: the sidecar that solves, the run directory that remembers. Nothing here may stop training."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snip_megatron.adoption import Decision, Verdict
from snip_megatron.config import SnipConfig
from snip_megatron.errors import SnipError
from snip_megatron.pace import Pace
from snip_megatron.precision import Format, Gemm, PrecisionMap, fp4_fraction, option_id
from snip_megatron.reporting.readers import read_events
from snip_megatron.reporting.run_directory import RunDirectory
from snip_megatron.sensitivity.policies import fixed_map
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.sidecar import SidecarClient, SidecarResult, SolveJob
from snip_megatron.statistics.table import LinearRow, StatisticsTable
from snip_megatron.step_report import StepFigures

_POLL_S = 0.01


def replay_schedule(run: str) -> list[tuple[int, Path]]:
    """(step, map file) of every adoption that a run directory recorded, in order. Raises SnipError."""
    folder = Path(run)
    schedule = []
    for event in read_events(folder):
        if event.get("event") == "adopt":
            step = int(event["step"])
            path = folder / "maps" / f"step_{step}.json"
            if not path.is_file():
                raise SnipError(f"--snip-replay {run}: events.jsonl adopts a map at step {step} but {path} is missing")
            schedule.append((step, path))
    if not schedule:
        raise SnipError(
            f"--snip-replay {run}: no adopted map is recorded there; give the directory of a run under SNIP"
        )
    return schedule


class RankZeroCoordinator:
    """Implements :class:`snip_megatron.controller.Coordinator` on rank 0.

    Args:
        config: the run's configuration.
        request: what every update asks; its version is set per update.
        linears: the model's linears.
        static_map: the map of ``--snip-map``, already checked.
        run: the run directory; None when the run keeps none.
        tokens_per_step: that ``request`` is of; None where its FLOPs do not depend on them.
        pace: compares step times under maps with bf16's; None where quantised GEMMs are emulated, which is slow anyway.
    """

    def __init__(
        self,
        config: SnipConfig,
        request: SolveRequest,
        linears: tuple[LinearRow, ...],
        static_map: PrecisionMap | None,
        run: RunDirectory | None,
        tokens_per_step: int | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._config = config
        self._request = request
        self._tokens_per_step = tokens_per_step
        self._linears = linears
        self._flops = {row.name: row.flops for row in linears}
        self._static_map = static_map
        self._run = run
        self._pace = pace
        self._replay = dict(replay_schedule(config.replay)) if config.replay is not None else {}
        self._decisions: dict[int, Decision] = {}
        self._submitted: dict[int, int] = {}
        self._in_force: PrecisionMap | None = None
        self._speedups: list[tuple[int, float | None]] = []  # (step from which, predicted speedup), ascending
        self._sidecar: SidecarClient | None = None
        self._restarts = 0
        if config.updates:
            self._sidecar = SidecarClient(deadline_s=config.deadline)
            self._sidecar.start()

    # -- updates -----------------------------------------------------------------------------------------------
    def submit(self, step: int, table: StatisticsTable, version: int) -> None:
        """Hand an update to the sidecar; returns at once."""
        assert self._sidecar is not None
        self._submitted[version] = step
        if self._run is not None:
            self._run.write_statistics(step, table)
        request = dataclasses.replace(self._request, version=version)
        if self._tokens_per_step is not None:
            request = request.of_step(table.tokens_per_step / self._tokens_per_step)
        self._sidecar.submit(SolveJob(table=table, request=request, hint=self._hint()))

    def _hint(self) -> dict[str, Format] | None:
        """The choices in force under the ids of this run's options, wherever the map came from."""
        if self._in_force is None:
            return None
        gemms = tuple(Gemm) if self._request.granularity == "gemm" else (None,)
        return {
            option_id(row.name, gemm): self._in_force.format_of(row.name, gemm or Gemm.FPROP)
            for row in self._linears
            for gemm in gemms
        }

    def pump(self, step: int) -> None:
        """Take in what the sidecar has to say, without blocking."""
        if self._sidecar is None:
            return
        while (result := self._sidecar.poll()) is not None:
            self._take(step, result)
        if self._sidecar.restarts > self._restarts:
            self._restarts = self._sidecar.restarts
            self.event(step, "sidecar_restart", restarts=self._restarts)

    def answered(self, version: int) -> bool:
        """Whether the outcome of an update is known; returns at once."""
        return version in self._decisions

    def decision(self, step: int, version: int) -> Decision:
        """What is known about an update now, or after ``--snip-wait`` seconds at most."""
        until = time.monotonic() + self._config.wait
        while version not in self._decisions and time.monotonic() < until:
            time.sleep(_POLL_S)
            self.pump(step)
        return self._decisions.pop(version, Decision(Verdict.NOT_READY))

    def _take(self, step: int, result: SidecarResult) -> None:
        version = result.version
        if result.failure is not None:
            self._decisions[version] = Decision(Verdict.DROPPED)
            self.event(
                step,
                "solve_failed",
                version=version,
                reason=result.failure.kind,
                message=result.failure.message,
                latency_s=result.latency_s,
            )
            return
        precision_map = result.precision_map
        assert precision_map is not None
        if precision_map.budget is not None:
            precision_map = self._with_predictions(precision_map)
        self._decisions[version] = Decision(Verdict.MAP, precision_map)
        self.event(
            step,
            "solved",
            version=version,
            status=precision_map.status,
            objective=precision_map.objective,
            bound=precision_map.bound,
            achieved=precision_map.achieved,
            achieved_per_stage=dict(precision_map.achieved_per_stage),
            **(precision_map.prediction() | self._loss_without_penalty(result)),
            solve_seconds=precision_map.solve_seconds,
            latency_s=result.latency_s,
        )
        if self._run is not None:
            submitted = self._submitted.pop(version, step)
            self._run.write_problem(submitted, result.problem_json or "")
            self._run.write_scores(submitted, _named_scores(result.scores), version=version)

    def _with_predictions(self, precision_map: PrecisionMap) -> PrecisionMap:
        """A map asked for by time or loss, with its share of FLOPs in fp4 and the whole step's speedup."""
        assert self._request.times is not None
        step = self._request.times.step_speedup(
            {row.name: row.stage for row in self._linears},
            {int(stage): share for stage, share in precision_map.achieved_per_stage.items()},
        )
        return precision_map.with_fields(fp4_share=fp4_fraction(precision_map, self._flops), step_speedup=step)

    def _loss_without_penalty(self, result: SidecarResult) -> dict[str, float | None]:
        """Σ loss where the objective holds more than that."""
        if not self._request.change_penalty or result.solution is None:
            return {}
        return {"loss": result.solution.loss}

    # -- fixed maps --------------------------------------------------------------------------------------------
    def initial_map(self, step: int) -> Decision:
        """The map to start under: a static one, a uniform policy's, or none."""
        if self._static_map is not None:
            return Decision(Verdict.MAP, self._static_map)
        names, request = [row.name for row in self._linears], self._request
        fixed = fixed_map(self._config.policy, names, request.pins, request.groups)
        if self._config.replay is None and fixed is not None:
            return Decision(Verdict.MAP, fixed)
        return Decision(Verdict.DROPPED)

    def replay_steps(self) -> list[int]:
        """Steps at which the replayed run adopted a map."""
        return sorted(self._replay)

    def replayed_map(self, step: int) -> Decision:
        """The map that the replayed run adopted at ``step``."""
        path = self._replay[step]
        return Decision(Verdict.MAP, PrecisionMap.from_json(path.read_text(encoding="utf-8"), where=str(path)))

    # -- record ------------------------------------------------------------------------------------------------
    def event(self, step: int, kind: str, /, **fields: Any) -> None:
        """See :meth:`RunDirectory.event`."""
        if self._run is not None:
            self._run.event(step, kind, **fields)

    def step_took(self, step: int, seconds: float) -> None:
        """How long a training step took; stands in the events that follow. Says so if maps make steps longer."""
        if self._run is not None:
            self._run.step_s = round(seconds, 6)
        slower = None if self._pace is None else self._pace.step(seconds)
        if slower is not None:
            self.event(step, "slower", **dataclasses.asdict(slower), ratio=slower.ratio)
            print(f"snip: {slower}", flush=True)

    def metric(self, figures: StepFigures, fp4_fraction: float) -> None:
        """One line of metrics.jsonl."""
        if self._run is None:
            return
        fields = {}
        if self._request.timed:
            past = [speedup for step, speedup in self._speedups if step <= figures.step]
            fields["predicted_speedup"] = past[-1] if past else None
        self._run.metric(figures.step, figures.loss, figures.grad_norm, fp4_fraction, **fields)

    def adopted(self, step: int, precision_map: PrecisionMap) -> None:
        """Keep the adopted map; the next update starts from it."""
        self._in_force = precision_map
        if self._pace is not None:
            self._pace.adopted(precision_map)
        self._speedups.append((step, precision_map.speedup))
        if self._run is not None:
            self._run.write_map(step, precision_map)

    def close(self) -> None:
        """End the sidecar, flush the record, draw the report. A report that fails is said, not raised."""
        if self._sidecar is not None:
            self._sidecar.close()
            self._sidecar = None
        if self._run is None:
            return
        self._run.close()
        path = self._run.path
        # The run is over and its record is on disk: nothing about drawing it (a missing package, a full disk, a page
        # that cannot be made of what was recorded) may change how the job ends.
        try:
            from snip_megatron.reporting.report import write_report

            write_report(path)
        except Exception as error:
            print(f"snip: no report: {error}; later: snip report {path}", flush=True)
        self._run = None


def _named_scores(scores: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Sensitivity's scores under the names of a ``snip.scores/1`` file."""
    return {
        option: {
            fmt: {
                "delta_loss": score["loss_divergence"],
                "delta_weight": score["weight_divergence"],
                "q": score["q"],
            }
            for fmt, score in by_format.items()
        }
        for option, by_format in scores.items()
    }

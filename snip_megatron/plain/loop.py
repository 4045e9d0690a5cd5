"""``convert(model, optimizer)`` and ``step(loss)``: SNIP in a plain torch training loop."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from snip_megatron import __version__
from snip_megatron.layers.context import StepContext
from snip_megatron.layers.registry import LinearRegistry, check_map_fits, describe_left_out, load_map
from snip_megatron.numerics.products.selection import native_backend, select_backend
from snip_megatron.plain.host import Loss, PlainStep, check_optimizer, make_host
from snip_megatron.plain.model import Structure, convert_linears, find_structure
from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.errors import SnipError, python_arguments
from snip_megatron.reporting.end_of_run import finish
from snip_megatron.reporting.sensitivity import lines, rank, unit_of
from snip_megatron.reporting.sinks import Sinks
from snip_megatron.runtime.agreement import Terms, configuration_table, of_group, on_rank_zero, together
from snip_megatron.runtime.config import SnipConfig, dominated, resolve
from snip_megatron.runtime.controller import Controller, OnAdopt
from snip_megatron.runtime.coordinator import RankZeroCoordinator
from snip_megatron.runtime.host import ProbeResult
from snip_megatron.runtime.probe import ProbeRunner
from snip_megatron.runtime.rise import Rise
from snip_megatron.runtime.run_directory import RunDirectory
from snip_megatron.runtime.solving import SolverInProcess
from snip_megatron.runtime.state import ControllerState
from snip_megatron.sensitivity.policies import fixed_map, formats_of, needs_forward_noise
from snip_megatron.sensitivity.problem import build_problem, check_reachable
from snip_megatron.sensitivity.table import StatisticsTable

#: Fields of SnipConfig that have an effect in Megatron's loop only.
_MEGATRON_ONLY = (
    "enabled", "replay", "timings", "gradient_reduction", "fusions", "wait",
    "deadline", "no_compat", "stage_tolerance", "probe_microbatches",
)  # fmt: skip


@python_arguments()
def convert(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    blocks: Sequence[nn.Module] | None = None,
    microbatches: int = 1,
    steps: int | None = None,
    allow_partial: bool = False,
    on_adopt: OnAdopt | None = None,
    **options: Any,
) -> PlainSnip:
    """Convert the linears of a transformer in place, and return the object that chooses their formats during training.

        snip = convert(model, optimizer, budget="fp4=0.75", first_update=100, update_interval=1000)
        for tokens, labels in batches:
            loss = lambda: cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
            snip.step(loss)
            optimizer.zero_grad()
            value = loss()
            value.backward()
            optimizer.step()
            snip.record(value)
        snip.close()

    Parameters, their names and the model's ``state_dict`` do not change. Until the first update everything runs as
    before. DDP and ``torch.compile`` may wrap the model before or after, and ``fully_shard`` may shard it before.
    Raises SnipError if no blocks are found, if less than half of them is in reach, if the optimizer does not train what
    is converted, or if an option is unknown or cannot work in a plain loop.

    Args:
        model: A transformer of pre-norm blocks. Frozen linears are converted as well, and have no wgrad.
        optimizer: torch's Adam, AdamW or SGD over its parameters.
        blocks: The blocks in order. By default the longest list of modules that have four linears or more.
        microbatches: Number of batches whose gradients one optimizer step adds up.
        steps: Number of training steps, if it is known. By default the first update is then after a tenth of them.
        allow_partial: Convert a model of whose matrices less than half is in reach.
        on_adopt: Called on every rank as that of :func:`snip_megatron.attach.attach`.
        options: Fields of :class:`runtime.SnipConfig`: budget, formats, first_update, update_interval,
            policy, pin, map, gemm, seed, dir and others.
    """
    if microbatches < 1:
        raise SnipError(f"microbatches={microbatches}: must be at least 1")
    config = _configuration(options, steps)
    structure = find_structure(model, blocks, allow_partial=allow_partial)
    return PlainSnip(structure, optimizer, config, microbatches, steps, on_adopt)


class PlainSnip:
    """Chooses the formats of a model's linears while it trains. :func:`convert` returns one.

    ``registry`` holds the converted linears, and ``table`` the statistics of the latest update.
    """

    def __init__(
        self,
        structure: Structure,
        optimizer: torch.optim.Optimizer,
        config: SnipConfig,
        microbatches: int,
        last: int | None,
        on_adopt: OnAdopt | None = None,
    ) -> None:
        self._structure, self._optimizer, self._config, self._microbatches = structure, optimizer, config, microbatches
        self._last, self._on_adopt = last, on_adopt
        self._steps = 0
        self._began: float | None = None  # when the training step began whose time is not recorded yet
        self._open = False  # whether a step has begun whose loss is not recorded yet
        flops = structure.unquantised_flops  # for one token
        self._request = config.request(unquantised_stage_flops={0: flops} if flops else None)
        rows = tuple(structure.linears)
        names = [row.name for row in rows]
        self._fixed = None if config.map is None else load_map(config.map, names, argument="map")
        if config.updates:
            check_reachable(rows, self._request)
            check_optimizer(optimizer, structure, weighs_updates=needs_forward_noise(self._request))
        if os.environ.get("RANK", "0") == "0":
            print("\n".join(f"snip: {line}" for line in structure.describe()), flush=True)
        formats = None if self._fixed is not None else formats_of(config.policy, config.formats, config.pins)
        context = StepContext(seed=config.seed, backend=select_backend(config.gemm, formats).backend)
        context.bf16_eval = config.eval == "bf16"
        fixed = self._fixed or fixed_map(config.policy, names, config.pins, config.formats)
        self.registry: LinearRegistry = convert_linears(structure.linears, context)
        self.table: StatisticsTable | None = None
        self._probes: ProbeRunner | None = None
        self._controller: Controller | None = None
        self._restored: ControllerState | None = None
        if fixed is not None:
            self.registry.adopt(fixed)
        if self._fixed is not None and (line := describe_left_out(self._fixed, names)):
            print(f"snip: map={config.map}: {line}", flush=True)

    @property
    def map(self) -> PrecisionMap:
        """The precision map in force. Before the first update it is all bf16."""
        return self.registry.current

    @python_arguments()
    def step(self, loss: Loss) -> bool:
        """Begin a training step. Call this on all ranks, before the forward of the step's first batch.

        If an update is due, the passes of a probe run on the loss, the solver chooses a map, and the map is adopted.
        Weights, optimizer, gradients, buffers and random states stay as they were. An update is dropped, with a line,
        if a statistic is not finite, if no gradient reaches the linears, if one of its parts raises an exception, or
        if no map meets the budget.

        ``loss`` returns the mean token loss of the step's first batch. It is called once at the first step, and up to
        six times in an update, some of them without gradients. It must compute the same value each time, so read the
        batch outside of it.

        Returns whether a new map was adopted. Raises SnipError if the model's blocks are not attention and MLP, or the
        loss does not run each of them once.
        """

        def probe(clip: float) -> ProbeResult:
            assert self._probes is not None
            result = self._probes.measure(self._step(step, loss), clip)
            self.table = result.table
            return result

        def measure(maps: Sequence[PrecisionMap]) -> list[Rise]:
            assert self._probes is not None
            return self._probes.measure_maps(self._step(step, loss), maps)

        self._end_step()
        step, previous = self._steps, self.map
        if self._controller is None:
            self._controller = self._start(loss)
        self._steps += 1
        self._controller.before_step(step, probe, measure)
        self._controller.decide_now(step, measure)
        self._open, self._began = True, time.perf_counter()
        return self.map is not previous

    def record(self, loss: torch.Tensor | float) -> None:
        """End a training step with its loss. Call this on all ranks, after the optimizer's step, or never.

        The run directory then shows the loss, and the guard takes a map back under which it spikes.
        """
        if not self._open or self._controller is None:
            raise SnipError("record() ends a step that step() has begun: call each of them once")
        self._open = False
        self._controller.after_step(self._steps - 1, torch.as_tensor(loss), None)

    def close(self) -> None:
        """End the run on all ranks: record the last step, and write the report. Another :meth:`step` resumes it."""
        self._end_step()
        if self._controller is not None:
            self._controller.close(together=True)
            self._restored, self._controller = self._controller.state, None

    def _end_step(self) -> None:
        """Record the duration of the step that has begun, and end it without a loss if none was recorded."""
        self._time_step()
        if self._open and self._controller is not None:
            self._controller.after_step(self._steps - 1, None, None)
        self._open = False

    def _time_step(self) -> None:
        coordinator = None if self._controller is None else self._controller.coordinator
        if self._began is not None and coordinator is not None:
            coordinator.record_step_time(self._steps - 1, time.perf_counter() - self._began)
        self._began = None

    def summary(self) -> None:
        """Print which linears are sensitive: the harm of each GEMM, by kind and ranked, beside the map's choice."""
        if self.table is None:
            raise SnipError("no update has measured anything yet: summary() is for after the first one")
        harms = rank(build_problem(self.table, self._request)[1], self.map)
        print("\n".join(lines(harms, unit_of(self._config.policy, self._config.q))), flush=True)

    def _step(self, step: int, loss: Loss) -> PlainStep:
        return PlainStep(step, self._microbatches, self._structure.model, self._optimizer, loss)

    def _start(self, loss: Loss) -> Controller:
        """Make the controller at the first step, when the process group exists and a batch is there to follow."""
        config, registry = self._config, self.registry
        backend = registry.context.backend
        together(lambda: (True, Terms(configuration_table(config, backend.name, backend.products, {}))), of_group())
        device = next(iter(registry)).weight.device
        if dist.is_initialized():
            registry.context.dp_rank, registry.context.dp_size = dist.get_rank(), dist.get_world_size()
        if config.updates and self._probes is None:
            with self._step(self._steps, loss).undisturbed():
                host, registry.rows = make_host(self._structure, loss, device)
            self._probes = ProbeRunner(host, registry, config, weighs_updates=needs_forward_noise(self._request))
        return Controller(
            config,
            registry,
            device,
            on_rank_zero(lambda: self._make_coordinator(device)),
            Sinks(),
            clip_grad=0.0,
            restored=self._restored,
            unquantised=self._structure.unquantised_flops,
            on_adopt=self._on_adopt,
        )

    def _make_coordinator(self, device: torch.device) -> RankZeroCoordinator:
        config, structure = self._config, self._structure
        facts = {
            "version": __version__,
            "torch": torch.__version__,
            "host": socket.gethostname(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "gemm_backend": self.registry.context.gemm_backend,
            "world_size": self.registry.context.dp_size,
            "request": self._request.as_dict(),
            "train_iters": self._last,
            "unquantised_flops": {0: structure.unquantised_flops},
            "stays_bf16": [f"{row.name} ({type(module).__name__})" for row, module in structure.unconverted.items()],
        }
        identity = dataclasses.replace(config, dir=None, overwrite=False).as_dict()
        resumed, run = None if self._restored is None else self._steps, None
        if config.dir is not None:
            run = RunDirectory(config.dir, identity, overwrite=config.overwrite, resume_step=resumed, facts=facts)
        rows, solver = self.registry.rows, SolverInProcess()
        return RankZeroCoordinator(
            config, self._request, rows, self._fixed, run, tokens_per_step=1, finished=finish, solver=solver
        )

    # -- checkpoints -----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the step and SNIP's state. Save it beside the state of the model and of the optimizer."""
        self._time_step()
        state = self._restored or ControllerState()
        saved = state.to_bytes() if self._controller is None else self._controller.state_to_save()
        return {"steps": self._steps, "state": saved.decode()}

    @python_arguments()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of :meth:`state_dict`. A map that the options fix replaces that of the state.

        Raises SnipError, and changes nothing, if ``state`` is something else, or its map is not one of this model.
        """
        steps, text = (state.get(name) if isinstance(state, Mapping) else None for name in ("steps", "state"))
        if type(steps) is not int or steps < 0 or not isinstance(text, str):
            raise SnipError("SNIP's state: this is not what state_dict() returned; give that of the checkpoint")
        restored = ControllerState.from_bytes(text.encode())
        saved = restored.precision_map
        if saved is not None:
            check_map_fits(saved, self.registry.names, "SNIP's state")
            if self._config.updates:
                self.registry.adopt(saved)
        self._steps, self._restored, self._controller = steps, restored, None
        self._open, self._began = False, None


# -- configuration -------------------------------------------------------------------------------------------------
def _configuration(options: Mapping[str, Any], steps: int | None) -> SnipConfig:
    for name in options:
        if name in _MEGATRON_ONLY:
            raise SnipError(f"{name}= has no effect in a plain loop: leave it out")
    native = native_backend(options.get("gemm", SnipConfig.gemm))
    config = resolve({"lag": 1, **options}, native, has_end=False, steps=steps)
    if steps is not None and config.updates and config.first_update >= steps:
        raise SnipError(f"first_update={config.first_update}: a training of steps={steps} ends before its first update")
    if config.budget.timed and config.updates:
        default = "" if "budget" in options else f", the default on {torch.cuda.get_device_name()}"
        raise SnipError(f"budget={config.budget}{default}: a plain loop knows no times, and takes budget='fp4=SHARE'")
    if config.late or config.phases is not None:
        option = f"policy={config.policy!r}" if config.late else f"schedule={config.schedule!r}"
        raise SnipError(f"{option} is not supported in a plain loop, whose end is unknown; use Megatron's entry")
    if config.updates and (line := dominated(config.budget, config.formats, native, times=False)):
        print(f"snip: {line.removeprefix('--snip-')}", flush=True)
    return config

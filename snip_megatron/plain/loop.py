"""``convert(model, optimizer)`` and ``step(loss)``: SNIP in a plain torch training loop of one process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from snip_megatron.config import SnipConfig
from snip_megatron.errors import SnipError
from snip_megatron.gemm.selection import select_backend
from snip_megatron.layers.context import StepContext
from snip_megatron.layers.registry import LinearRegistry, check_map_fits
from snip_megatron.plain.host import Loss, PlainStep, make_host
from snip_megatron.plain.linear import convert_linears, linear_rows
from snip_megatron.plain.structure import Structure, check_plain, find_structure
from snip_megatron.precision import PrecisionMap
from snip_megatron.reporting.sinks import Sinks
from snip_megatron.runtime.adoption import MapChannel
from snip_megatron.runtime.controller import Controller
from snip_megatron.runtime.coordinator import RankZeroCoordinator
from snip_megatron.runtime.probing.probe import ProbeRunner
from snip_megatron.runtime.protocols import ProbeResult
from snip_megatron.runtime.sidecar.solving import SolverInProcess
from snip_megatron.runtime.state import ControllerState
from snip_megatron.runtime.step_report import StepReport
from snip_megatron.sensitivity.fixed import formats_of
from snip_megatron.sensitivity.policies import needs_forward_noise
from snip_megatron.sensitivity.problem import check_reachable
from snip_megatron.statistics.table import StatisticsTable

#: Fields of SnipConfig that need Megatron's loop or a run directory.
_WITH_MEGATRON = (
    "enabled",
    "dir",
    "overwrite",
    "replay",
    "trigger",
    "timings",
    "cost",
    "communication",
    "gradient_reduction",
    "fusions",
    "wait",
    "deadline",
    "no_compat",
)


def convert(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    blocks: Sequence[nn.Module] | None = None,
    linears: Sequence[str] | None = None,
    norms: Sequence[str] | None = None,
    microbatches: int = 1,
    **options: Any,
) -> PlainSnip:
    """Convert the linears of a transformer in place, and return the object that chooses their formats during training.

        snip = convert(model, optimizer, budget="fp4=0.75", first_update=100, update_interval=1000)
        for tokens, labels in batches:
            loss = lambda: cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
            snip.step(loss)
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()

    Parameters, their names and the model's ``state_dict`` do not change. Until the first update everything runs as
    before.

    Args:
        model: A transformer of pre-norm blocks in this process: not wrapped by DDP, FSDP or ``torch.compile``.
        optimizer: torch's Adam, AdamW or SGD over its parameters.
        blocks: The blocks in order. None: the longest list of modules with four linears or more.
        linears: Names in a block of its four linears: fused Q, K and V; attention's output; the MLP's input (gate and
            up fused); the MLP's output. None: all linears of a block in the order of their definition.
        norms: Names in a block of the norms before attention and before the MLP. None: all norms of a block.
        microbatches: Batches whose gradients one optimizer step adds up.
        options: Fields of :class:`snip_megatron.config.SnipConfig`: budget, formats, first_update, update_interval,
            policy, pin, map, gemm, seed and others.

    Raises:
        SnipError: If the model has another structure, or an option is unknown or cannot work in a plain loop.
    """
    config = _configuration(options)
    check_plain(model)
    if microbatches < 1:
        raise SnipError(f"microbatches={microbatches}: must be at least 1")
    structure = find_structure(model, blocks, linears, norms)
    return PlainSnip(model, optimizer, structure, config, microbatches)


class PlainSnip:
    """Chooses the formats of a model's linears while it trains. Made by :func:`convert`.

    Attributes:
        registry: the converted linears.
        table: the statistics of the latest update, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        structure: Structure,
        config: SnipConfig,
        microbatches: int,
    ) -> None:
        self._config, self._request, self._rows = config, config.request(), linear_rows(structure.linears)
        self._given = None if config.map is None else _read_map(config.map, [row.name for row in self._rows])
        if config.updates:
            check_reachable(self._rows, self._request)
        host, weighs_updates = make_host(structure), needs_forward_noise(self._request)
        self._device, self._steps = host.device, 0
        self._step_of = functools.partial(PlainStep, microbatches, model, optimizer)
        if config.updates and weighs_updates:
            step = self._step_of(0, lambda: torch.zeros(()))
            for weight in structure.weights:  # before anything is converted
                step.update_of(weight)
        formats = None if self._given is not None else formats_of(config.policy, config.formats, config.pins)
        context = StepContext(seed=config.seed, backend=select_backend(config.gemm, formats).backend)
        context.bf16_eval = config.eval == "bf16"
        self.registry: LinearRegistry = convert_linears(structure.linears, context)
        self.table: StatisticsTable | None = None
        self._probes = ProbeRunner(host, self.registry, config, weighs_updates=weighs_updates)
        self._control(None)

    def _control(self, restored: ControllerState | None) -> None:
        """Make the controller, and put the map in force with which it begins."""
        config, registry = self._config, self.registry
        coordinator = RankZeroCoordinator(
            config, self._request, self._rows, self._given, None, solver=SolverInProcess()
        )
        channel, report = MapChannel(registry.names, self._device), StepReport(self._device)
        flops = {row.name: row.flops for row in self._rows}
        self._controller = Controller(config, registry, channel, report, flops, coordinator, Sinks(), 0.0, restored)
        saved = None if restored is None else restored.precision_map
        first = coordinator.initial_map(self._steps).precision_map or saved
        if first is not None:
            registry.adopt(first)

    @property
    def map(self) -> PrecisionMap:
        """The precision map in force; bf16 before the first update."""
        return self.registry.current

    def step(self, loss: Loss) -> bool:
        """Begin a training step. Call this before the forward of the step's first batch.

        If an update is due, the passes of a probe run on the loss, the solver chooses a map, and the map is adopted.
        Weights, optimizer, gradients, buffers and random states stay as they were. An update is dropped, with a line,
        if a statistic is not finite, if no gradient reaches the linears, or if no map meets the budget.

        Args:
            loss: returns the mean token loss of the step's first batch. It is called up to three times in an update,
                otherwise not at all, and must compute the same each time: read the batch before, not inside.

        Returns:
            Whether a new map was adopted.

        Raises:
            SnipError: the loss does not run the model's blocks once each.
        """

        def probe(clip: float) -> ProbeResult:
            result = self._probes.run(self._step_of(step, loss), clip, sequences=1)
            self.table = result.table
            return result

        step, before = self._steps, self.map
        self._steps += 1
        self._controller.before_step(step, probe)
        self._controller.decide_now(step)
        self._controller.after_step(step, None, None)
        return self.map is not before

    # -- checkpoints -----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the step and SNIP's state, to be saved beside the model's and the optimizer's state."""
        return {"steps": self._steps, "state": self._controller.state_to_save().decode()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`. A map that the options fix replaces the one of the state.

        Raises SnipError if it is not such a state, or its map is not one of this model. Nothing has changed then.
        """
        steps, text = (state.get(name) if isinstance(state, Mapping) else None for name in ("steps", "state"))
        if type(steps) is not int or steps < 0 or not isinstance(text, str):
            raise SnipError("SNIP's state: this is not what state_dict() returned; give that of the checkpoint")
        restored = ControllerState.from_bytes(text.encode())
        if restored.precision_map is not None:
            check_map_fits(restored.precision_map, self.registry.names, "SNIP's state")
        self._steps = steps
        self._control(restored)


# -- configuration -------------------------------------------------------------------------------------------------
def _configuration(options: Mapping[str, Any]) -> SnipConfig:
    for name in options:
        if name in _WITH_MEGATRON:
            raise SnipError(f"{name}= has no effect in a plain loop: leave it out")
    known = {field.name: field for field in dataclasses.fields(SnipConfig)}
    if unknown := sorted(set(options) - set(known)):
        raise SnipError(f"convert(): unknown option {unknown[0]}=; the options are the fields of SnipConfig")
    several = {name for name, field in known.items() if isinstance(field.default, tuple)}
    values: dict[str, Any] = {name: _tuple(v) if name in several else v for name, v in options.items()}
    config = SnipConfig(enabled=True, **{"lag": 1, **values})
    if config.timed:
        raise SnipError(f"budget={config.budget}: a plain loop takes fp4=SHARE; times need Megatron's entry")
    if config.late or config.phases is not None:
        named = f"policy={config.policy!r}" if config.late else f"schedule={config.schedule!r}"
        raise SnipError(f"{named} is not supported in a plain loop, whose end is unknown; use Megatron's entry")
    return config


def _tuple(value: Any) -> tuple[str, ...]:
    return tuple(value.split(",")) if isinstance(value, str) else tuple(value)


def _read_map(path: str, names: Sequence[str]) -> PrecisionMap:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SnipError(f"map={path}: cannot be read ({error})") from None
    found = PrecisionMap.from_json(text, where=path)
    check_map_fits(found, names, path)
    return found

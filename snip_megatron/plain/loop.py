"""``convert(model, optimizer)`` and ``step(loss)``: SNIP in a plain torch training loop of one process."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from snip_megatron.config import SnipConfig
from snip_megatron.errors import SnipError
from snip_megatron.gemm.selection import select_backend
from snip_megatron.layers.context import StepContext
from snip_megatron.layers.registry import LinearRegistry, check_map_fits, decoder_linear_names
from snip_megatron.plain.linear import convert_linears
from snip_megatron.plain.probe import PlainProbe
from snip_megatron.plain.structure import Structure, check_plain, find_structure
from snip_megatron.plain.updates import check_optimizer
from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.sensitivity.fixed import FIXED, formats_of
from snip_megatron.sensitivity.policies import fixed_map, needs_forward_noise
from snip_megatron.sensitivity.problem import build_problem, change_penalty, check_reachable
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.solver import solve
from snip_megatron.statistics.table import LinearRow, StatisticsTable

logger = logging.getLogger(__name__)

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
    snip = PlainSnip(model, optimizer, structure, config, microbatches)
    logger.info("snip: %d linears of %d blocks", len(snip.registry), len(structure.blocks))
    return snip


class PlainSnip:
    """Chooses the formats of a model's linears while it trains. Made by :func:`convert`.

    Attributes:
        registry: The converted linears.
        map: The precision map in force; bf16 before the first update.
        table: The statistics of the latest update, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        structure: Structure,
        config: SnipConfig,
        microbatches: int,
    ) -> None:
        self._config = config
        self._request = _request(config)
        with_drift = needs_forward_noise(self._request)
        if with_drift and config.updates:
            check_optimizer(optimizer)
        if config.updates:
            check_reachable(_rows(structure), self._request)
        context = StepContext(seed=config.seed, backend=select_backend(config.gemm, _formats(config)).backend)
        context.bf16_eval = config.eval == "bf16"
        self._static = _static_map(config, structure)
        self.registry: LinearRegistry = convert_linears(structure.blocks, context)
        self.table: StatisticsTable | None = None
        self._probe = PlainProbe(
            model, structure, self.registry, optimizer, config, microbatches, with_drift=with_drift
        )
        self._steps = 0
        if self._static is not None:
            self.registry.adopt(self._static)

    @property
    def map(self) -> PrecisionMap:
        """The precision map in force."""
        return self.registry.current

    def step(self, loss: Callable[[], torch.Tensor]) -> bool:
        """Begin a training step. Call this before the forward of the step's first batch.

        If an update is due, the passes of a probe run on the loss, the solver chooses a map, and the map is adopted.
        Weights, optimizer, gradients, buffers and random states stay as they were. If a statistic is NaN or infinite,
        or no gradient reaches the linears, the update is dropped.

        Args:
            loss: Returns the mean token loss of the step's first batch. It is called up to three times in an update,
                otherwise not at all, and must compute the same each time: read the batch before, not inside.

        Returns:
            Whether a new map was adopted.

        Raises:
            SnipError: If the loss does not run the model's blocks once each, or the budget cannot be met.
        """
        step = self._steps
        self._steps += 1
        adopted = self._config.is_update_step(step) and self._update(loss, step)
        self.registry.start_step(step)
        return adopted

    def _update(self, loss: Callable[[], torch.Tensor], step: int) -> bool:
        self.table = self._probe.run(loss, step)
        if broken := self.table.non_finite():
            logger.warning("snip: step %d: the update is dropped, %s is not finite", step, broken[0])
            return False
        if not self.table.linear["g2"].any():  # every option would score zero
            logger.warning("snip: step %d: the update is dropped, no gradient reaches the linears", step)
            return False
        problem, _ = build_problem(self.table, self._request)
        solution = solve(
            problem,
            deterministic_time=self._request.deterministic_time,
            seed=self._request.seed % 2**31,
            hint=self.map.choices or None,
            change_penalty=change_penalty(problem, self._request),
        )
        if solution.status == "infeasible":
            raise SnipError(f"no map meets budget {self._config.budget}: {solution.fault}")
        self.registry.adopt(solution.to_precision_map(self.map.version + 1))
        logger.info("snip: step %d adopts map %d, fp4 share %.3f", step, self.map.version, solution.achieved or 0.0)
        return True

    # -- checkpoints -----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the step and the map, to be saved beside the model's and the optimizer's state."""
        return {"steps": self._steps, "map": self.map.to_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`. A map that the options fix replaces the one of the state.

        Raises SnipError if it is not such a state, or its map is not one of this model. Nothing has changed then.
        """
        steps, text = (state.get(name) if isinstance(state, Mapping) else None for name in ("steps", "map"))
        if type(steps) is not int or steps < 0 or not isinstance(text, str):
            raise SnipError("SNIP's state: this is not what state_dict() returned; give that of the checkpoint")
        if self._static is None:
            found = PrecisionMap.from_json(text, where="SNIP's state")
            if found.choices:
                check_map_fits(found, self.registry.names, "SNIP's state")
            self.registry.adopt(found)
        self._steps = steps


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


def _request(config: SnipConfig) -> SolveRequest:
    return SolveRequest(
        policy=config.policy,
        estimator=config.estimator,
        q=config.q,
        backward_share=config.backward_share,
        formats=config.formats,
        granularity=config.granularity,
        target=config.wanted.value,
        stage_tolerance=config.tolerance,
        change_penalty=config.change_penalty,
        pins=config.pins,
        protected_kinds=config.protected_kinds,
        seed=config.seed,
        deterministic_time=config.solver_time,
        backward_noise=config.backward_noise,
    )


def _formats(config: SnipConfig) -> frozenset[Format] | None:
    if config.policy not in FIXED and config.map is not None:
        return None
    return formats_of(config.policy, config.formats, config.pins)


def _rows(structure: Structure) -> tuple[LinearRow, ...]:
    modules = [module for block in structure.blocks for module in block.linears]
    names = decoder_linear_names(len(structure.blocks))
    return tuple(LinearRow(name, 0, m.out_features, m.in_features) for name, m in zip(names, modules, strict=True))


def _static_map(config: SnipConfig, structure: Structure) -> PrecisionMap | None:
    names = [row.name for row in _rows(structure)]
    if config.map is not None:
        try:
            text = Path(config.map).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SnipError(f"map={config.map}: cannot be read ({error})") from None
        found = PrecisionMap.from_json(text, where=config.map)
        check_map_fits(found, names, config.map)
        return found
    return fixed_map(config.policy, names, config.pins, config.formats)

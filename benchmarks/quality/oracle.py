"""The oracle of ``validate_proxy``: forces every option alone, and reads what it does to loss and update.

An option is a format for one GEMM of one linear. Every microbatch of a trial runs twice in one call of Megatron's
schedule: with the option and the loss times +1, and without it and the loss times −1. Each ``main_grad`` then holds the
change of the gradient and nothing else, in FP32. All other GEMMs run in bf16.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from benchmarks.quality.truth import Trial, Truth, plan_trials, save_truth, truth_of
from snip_megatron.layers.context import GEMM_INDEX, LinearHandle, Override
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.megatron import compat, setup
from snip_megatron.megatron.host import MegatronStep
from snip_megatron.numerics.products.backend import GemmBackend, unrounded
from snip_megatron.precision import ALL_BF16, Format, Formats, Gemm
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.host import Host, ProbeResult
from snip_megatron.sensitivity.table import StatisticsTable
from snip_megatron.sensitivity.update_error import AdamWState, StepScale

NUDGE = 2.0**-6
"""Size of a nudge relative to the machine epsilon of the training dtype. In bf16 a nudge is 1e-4 of a value. That is
far below a rounding step, but about one element in fifty rounds to another value. In FP32 a nudge changes nothing."""
_SCALE = "main_loss_backward_scale"
Outputs = tuple[torch.Tensor, Callable[..., Any]]


@dataclass(frozen=True)
class _Pass:
    """One microbatch pass: the number of the microbatch, and the factor of the loss: 0 if it only pads the schedule."""

    microbatch: int
    sign: int


@dataclass
class _Owner:
    """A parameter of this rank whose gradient is read.

    Attributes:
        row: index among the linears, then the sinks, of the table.
        weight: the parameter, with an FP32 ``main_grad``.
        update: the optimizer's next update of this rank's elements. None if another rank reports them.
        gradient: the elements' gradient without any option, as the optimizer sees it.
    """

    row: int
    weight: torch.nn.Parameter
    update: AdamWState | None
    gradient: torch.Tensor | None = None


class Oracle:
    """Forces options. Every rank has one, and all ranks call its methods at the same step.

    Raises SnipError if experts are parallel, or gradients are not summed in FP32.
    """

    def __init__(self, registry: LinearRegistry, host: Host) -> None:
        context, experts = registry.context, any(handle.expert is not None for handle in registry)
        if experts and context.expert_dp_size != context.dp_size:
            raise SnipError("options of parallel experts are not forced alone; use --expert-model-parallel-size 1")
        if any(getattr(handle.weight, "main_grad", handle.weight).dtype != torch.float32 for handle in registry):
            raise SnipError("differences of gradients are small: add --accumulate-allreduce-grads-in-fp32")
        self._registry = registry
        self._host = host
        self._tp_rank = host.groups.tp_rank

    def measure(
        self, step: MegatronStep, table: StatisticsTable, microbatches: Sequence[int], scale: StepScale
    ) -> Truth:
        """Force every option of ``table``. Returns the truth, equal on all ranks.

        ``table`` holds the statistics of the same step; ``microbatches`` are those that each trial runs, 0 being the
        first of the step.
        """
        names = [row.name for row in table.linears]
        trials, owners = plan_trials(names, table.formats), self._owners(step, names)
        device = self._host.device
        drift2 = torch.zeros(len(trials), len(names) + len(table.sinks), dtype=torch.float64, device=device)
        loss = torch.zeros(len(trials), dtype=torch.float64, device=device)
        both = [_Pass(microbatch, sign) for microbatch in microbatches for sign in (1, -1)]
        both += [_Pass(microbatches[0], 0)] * (-len(both) % self._host.pass_group)
        # As many passes as a trial has, which repeats the routing of experts pass by pass.
        plain = [replace(each, sign=max(0, each.sign)) for each in both]
        random: dict[tuple[int, int], Callable[[], None]] = {}
        with step.undisturbed(), compat.changed(self._registry.context, override=None):
            for index, trial in enumerate([None, *trials]):
                step.rewind()
                self._registry.start_step(step.step)
                passes = plain if trial is None else both
                call = _Call(step, self._registry, trial, passes, len(microbatches), random).run()
                for owner in owners:
                    self._read(step, owner, scale, None if trial is None else drift2[index - 1])
                if trial is not None:  # tensor parallel ranks see the same loss, and shards of G and E
                    change = call.loss if self._tp_rank == 0 else 0.0
                    loss[index - 1] = (change + call.first_order) * scale.gradient
        for sums in (drift2, loss):
            dist.all_reduce(sums)
        w2 = np.concatenate([table.linear["w2"], table.arrays["sink_w2"]])
        return truth_of(trials, drift2.cpu().numpy(), loss.cpu().numpy(), w2, names, table.formats)

    def _owners(self, step: MegatronStep, names: Sequence[str]) -> list[_Owner]:
        owned = [(names.index(handle.name), handle.weight, True) for handle in self._registry]
        sinks = self._host.local_sinks
        owned += [(len(names) + s.row, s.weight, not s.replicated or self._tp_rank == 0) for s in sinks]
        return [_Owner(row, weight, step.update_of(weight) if first else None) for row, weight, first in owned]

    @torch.no_grad()
    def _read(self, step: MegatronStep, owner: _Owner, scale: StepScale, drift2: torch.Tensor | None) -> None:
        """Reduce the accumulator, and add the squared drift that it causes to ``drift2`` [owners]. If that is None, the
        accumulator is the gradient without any option, which is kept. Collective.
        """
        gradient, groups = step.gradient(owner.weight), self._host.groups
        if groups.dp_size > 1:
            dist.all_reduce(gradient, group=groups.dp)
        if owner.update is None or not (self._host.optimizer_sharded or groups.dp_rank == 0):
            return
        shard = gradient.reshape(-1)[owner.update.start : owner.update.end] * (scale.gradient * scale.clip)
        if drift2 is None:
            owner.gradient = shard
        else:
            assert owner.gradient is not None
            drift2[owner.row] += owner.update.squared_error(owner.gradient, shard, [1.0])[0]


class _Call:
    """One call of the schedule, which tells the linears which pass is running.

    Forwards and backwards never overlap on a rank. A forward begins in :meth:`_forward_step`, a backward in the hook on
    the forward's output. What linears run until the next one begins, recomputed forwards included, is of that pass.

    Attributes:
        loss: this rank's share of the change of the loss by the option, in units of the schedule's loss.
        first_order: its share of −⟨G, E⟩ of fprop options, likewise.
    """

    def __init__(
        self,
        step: MegatronStep,
        registry: LinearRegistry,
        trial: Trial | None,
        passes: Sequence[_Pass],
        microbatches: int,
        random: dict[tuple[int, int], Callable[[], None]],
    ) -> None:
        call = step.call
        device = next(call.model[0].parameters()).device
        self.loss, self.first_order = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
        self._step = step
        self._registry = registry
        self._trial = trial
        self._passes = passes
        self._random = random
        self._auxiliary = _AuxiliaryScale()
        self._chunk = {id(chunk): index for index, chunk in enumerate(call.model)}
        self._forwards = [0] * len(call.model)
        self._current = passes[0]
        self._output: torch.Tensor | None = None  # of the last chunk, with the option
        # Megatron divides the loss by the microbatches of the call, unless it is summed over tokens.
        self._per_token = bool(call.config.calculate_per_token_loss)
        self._loss_factor = 1.0 if self._per_token else len(passes) / microbatches
        self._microbatches = microbatches

    def run(self) -> _Call:
        self._registry.context.override = self._forced
        self._step.schedule([each.microbatch for each in self._passes], self._forward_step)
        return self

    # -- Megatron's forward step -------------------------------------------------------------------------------
    def _forward_step(self, data_iterator: Any, model: torch.nn.Module, *arguments: Any) -> Outputs:
        chunk = self._chunk[id(model)]
        self._current = running = self._passes[self._forwards[chunk]]
        self._forwards[chunk] += 1
        # Dropout draws the same masks for a microbatch with and without the option.
        if (chunk, running.microbatch) in self._random:
            self._random[chunk, running.microbatch]()
        else:
            self._random[chunk, running.microbatch] = compat.random_states()
        output, loss_function = self._step.call.forward_step_func(data_iterator, model, *arguments)
        output.register_hook(partial(self._begin_backward, running))
        return output, partial(self._loss, running, loss_function)

    def _begin_backward(self, running: _Pass, gradient: torch.Tensor) -> None:
        self._current = running
        for handle in self._registry:  # a repeated microbatch rounds as it did before
            handle.state.backwards = running.microbatch
        self._auxiliary.multiply(running.sign * self._loss_factor)

    def _loss(self, running: _Pass, loss_function: Callable[..., Any], output: torch.Tensor) -> Any:
        """Compute the loss times the sign of the pass, and note how the option changes it."""
        if self._trial is not None and self._trial.gemm is Gemm.FPROP and running.sign:
            if running.sign > 0:
                self._output = output.detach()
            else:
                self._note_change(loss_function, output)
        loss, *extras = loss_function(output)
        return (loss * (running.sign * self._loss_factor), *extras)

    @torch.no_grad()
    def _note_change(self, loss_function: Callable[..., Any], output: torch.Tensor) -> None:
        """Note the change of the loss. It is linear in the losses of tokens, so it is evaluated on their differences,
        which avoids the cancellation of two sums.
        """
        assert self._output is not None
        change, *extras = loss_function(self._output - output.detach())
        if not self._per_token:
            change = change / (extras[0].clamp(min=1) if len(extras) == 2 else 1) / self._microbatches
        self.loss += change.double()

    # -- linears -----------------------------------------------------------------------------------------------
    def _forced(self, handle: LinearHandle) -> Override:
        trial, running, inner = self._trial, self._current, handle.context.backend
        if trial is None or not running.sign or handle.name not in trial.linears:
            return Override()
        if running.sign > 0:
            if trial.format is None:
                return Override(backend=NudgedGemm(inner, trial.gemm))
            return Override(_only(trial.gemm, trial.format))
        if trial.format is None or trial.gemm is not Gemm.FPROP:
            return Override()
        return Override(backend=ComparedFprop(inner, handle, trial.format, self._note_first_order))

    def _note_first_order(self, dot: torch.Tensor) -> None:
        """Note ⟨G, E⟩ of this rank's shards. G is of the pass whose loss is multiplied by −1."""
        self.first_order += dot


def _only(gemm: Gemm, fmt: Format) -> Formats:
    formats = list(ALL_BF16)
    formats[GEMM_INDEX[gemm]] = fmt
    return formats[0], formats[1], formats[2]


# -- backends of a pass in bf16 ----------------------------------------------------------------------------------------
class NudgedGemm(GemmBackend):
    """Multiplies as ``inner``, but the products of ``gemm``, fprop or dgrad, are times 1 + NUDGE·eps before rounding.

    The effect on the loss is the noise that another order of summation would also cause (docs/how-it-works.md).
    """

    def __init__(self, inner: GemmBackend, gemm: Gemm) -> None:
        self.name, self._inner, self._gemm = inner.name, inner, gemm

    def multiply(self, gemm: Gemm, a: Any, b: Any, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
        if gemm is not self._gemm:
            return self._inner.multiply(gemm, a, b, dtype, out)
        product = unrounded(a.tensor, b.tensor.t() if gemm is Gemm.FPROP else b.tensor)
        return (product * (1.0 + NUDGE * torch.finfo(dtype).eps)).to(dtype)


class ComparedFprop(GemmBackend):
    """Multiplies as ``inner``, and reports ⟨G, E⟩ in the backward, where E is the error of fprop in a format.

    ``report`` is called with a float64 scalar, of this rank's shards and G as autograd passes it, for every expert.
    """

    def __init__(
        self, inner: GemmBackend, handle: LinearHandle, fmt: Format, report: Callable[[torch.Tensor], None]
    ) -> None:
        self.name, self._inner, self._handle, self._format, self._report = inner.name, inner, handle, fmt, report
        self._errors: deque[torch.Tensor] = deque()  # E [T, N] of the linear, or of each of its experts

    def multiply(self, gemm: Gemm, a: Any, b: Any, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
        product = self._inner.multiply(gemm, a, b, dtype, out)
        if gemm is Gemm.FPROP:
            specs = (
                (side.tensor, self._handle.spec(name, side.tensor, self._format, None))
                for name, side in (("x", a), ("w", b))
            )
            left, right = (self._inner.quantize(tensor, spec)[0] for tensor, spec in specs)
            error = self._inner.multiply(gemm, left, right, dtype).float() - product.float()
            self._errors.append(error.to(dtype))
        elif gemm is Gemm.DGRAD:
            self._report((a.tensor.float() * self._errors.popleft().float()).sum(dtype=torch.float64))
        return product


# -- in a training -------------------------------------------------------------------------------------------------
Action = Callable[[Oracle, SnipConfig, MegatronStep, ProbeResult], None]


@contextmanager
def after_each_probe(action: Action) -> Iterator[None]:
    """Call ``action`` on all ranks after each probe of a training that runs in this context."""

    class Probes(setup.ProbeRunner):
        def __init__(self, host: Host, registry: LinearRegistry, config: SnipConfig, **options: Any) -> None:
            super().__init__(host, registry, config, **options)
            self._oracle, self._run_config = Oracle(registry, host), config

        def run(self, step: Any, *arguments: Any) -> ProbeResult:
            result = super().run(step, *arguments)
            action(self._oracle, self._run_config, step, result)
            return result

    with mock.patch.object(setup, "ProbeRunner", Probes):
        yield


def record(oracle: Oracle, config: SnipConfig, step: MegatronStep, result: ProbeResult) -> None:
    """Measure on the microbatches of a probe and on as many others, and write the truth. Collective."""
    used = result.microbatches
    both = (range(used), range(used, 2 * used))
    truth, again = (oracle.measure(step, result.table, microbatches, result.scale) for microbatches in both)
    if dist.get_rank() == 0:
        save_truth(Path(config.dir), result.table.step, truth, again)


class _AuxiliaryScale:
    """Multiplies the gradients of auxiliary losses and of token prediction by the factor of a pass.

    Megatron adds these gradients in the backward, whatever factor the loss has. Their scale is the same for all
    microbatches of a call of the schedule.
    """

    def __init__(self) -> None:
        self._scales: dict[Any, torch.Tensor] = {}

    def multiply(self, factor: float) -> None:
        """Multiply the gradients of the next backwards by ``factor``."""
        for scaler in (MoEAuxLossAutoScaler, MTPLossAutoScaler):
            scale = getattr(scaler, _SCALE)
            if scale is not None:
                setattr(scaler, _SCALE, self._scales.setdefault(scaler, scale.clone()) * factor)

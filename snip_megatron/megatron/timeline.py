"""The timeline of a Megatron run: its end, its phases, and the share of an error that later training repairs."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from snip_megatron.megatron import compat
from snip_megatron.megatron.model_linears import ModelLinears
from snip_megatron.megatron.startup import say
from snip_megatron.precision.errors import SnipError
from snip_megatron.precision.phases import PrecisionPlan
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.state import Timeline
from snip_megatron.sensitivity.policies import late_plan
from snip_megatron.sensitivity.request import STANDING_WEIGHTS, SolveRequest, carried_weights

_SAMPLES = 1000  # of the learning rate over a run


def timeline_of(
    config: SnipConfig,
    args: argparse.Namespace,
    request: SolveRequest,
    linears: ModelLinears,
    scheduler: Any,
    step: int,
) -> Timeline | None:
    """Return the timeline. Returns None if Megatron does not know where training ends.

    ``scheduler`` is that of the learning rate, and ``step`` the next training step, counted from 0. Raises SnipError if
    the end is unknown and the policy has a fixed plan.
    """
    last = int(args.train_iters or 0)
    schedule = config.phases
    if last <= 0:
        if config.late:
            raise SnipError(f"--snip-policy {config.policy} needs an end of training: give --train-iters")
        if schedule is not None:
            say(
                f"--snip-schedule {config.schedule}: the end of training is unknown without --train-iters: every update"
                " gives one map, and the budget holds for each; give --train-iters for phases"
            )
        return None

    learning_rate = compat.learning_rate(scheduler, args, step)

    def carried(origin: int, begins: Sequence[int], until: int) -> Sequence[float]:
        rates = relative_rates(learning_rate, origin, until)
        return carried_weights(origin, begins, until, rates)

    def fixed(origin: int, last: int, step: int, spent: float) -> PrecisionPlan:
        unquantised = sum(linears.uncovered_flops.values())
        return late_plan(request, linears.flops, origin, last, unquantised, step=step, spent=spent)

    standing, timed = STANDING_WEIGHTS[config.deployed], config.budget.kind == "speedup"
    return Timeline(last, schedule, fixed if config.late else None, carried, standing=standing, timed=timed)


def relative_rates(learning_rate: Callable[[int], float], origin: int, last: int) -> tuple[float, ...]:
    """Return learning rates sampled evenly from ``origin`` to ``last``, relative to the largest. Ones if all are 0."""
    count = max(1, min(_SAMPLES, last - origin))
    rates = [learning_rate(origin + (last - origin) * i // count) for i in range(count + 1)]
    most = max(rates)
    return tuple(rate / most for rate in rates) if most > 0 else (1.0,) * len(rates)

"""The learning rate of every step of a run, from Megatron's own scheduler."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from snip_megatron.errors import SnipError
from snip_megatron.megatron.compat.versions import check_signature

check_signature(OptimizerParamScheduler.get_lr, ("self", "param_group"), "OptimizerParamScheduler.get_lr")
if "num_steps" not in OptimizerParamScheduler.get_lr.__code__.co_names:
    raise SnipError("Megatron's scheduler no longer counts in 'num_steps': the learning rates of a run are unknown")


def learning_rate(scheduler: Any, args: argparse.Namespace, step: int) -> Callable[[int], float]:
    """Return a function from a step to its learning rate, that of parameters without overrides.

    The scheduler counts samples. They are taken to grow evenly up to ``step``, and from there to the end of the run,
    which is exact unless the batch size ramps up.

    Args:
        scheduler: Megatron's scheduler of the optimizer's parameters, before it has run ``step``.
        args: Megatron's arguments.
        step: the 0-based training step that is next.
    """
    done, last = int(scheduler.num_steps), int(args.train_iters or 0)
    whole = int(getattr(args, "train_samples", None) or last * int(args.global_batch_size))

    def rate(at: int) -> float:
        if at < step:
            samples = done * at // step
        else:
            samples = done + max(0, whole - done) * (at - step) // max(1, last - step)
        counted = scheduler.num_steps
        scheduler.num_steps = samples
        try:
            return float(scheduler.get_lr({}))
        finally:
            scheduler.num_steps = counted

    return rate

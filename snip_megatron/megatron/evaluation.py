"""Validation under SNIP: in the map's formats, in bf16, or both on the same batches (``--snip-eval``)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from snip_megatron.errors import SnipError
from snip_megatron.layers.context import StepContext
from snip_megatron.megatron import compat

_LOSS = "lm loss"
BF16_LOSS = "lm loss in bf16"
"""Name of the second loss in Megatron's own log line, TensorBoard and wandb."""

Record = Callable[[dict[str, float]], None]


def check_evaluation(mode: str, args: argparse.Namespace) -> None:
    """Raises SnipError where both validations cannot see the same batches."""
    if mode == "both" and (args.full_validation or args.multiple_validation_sets):
        name = "--full-validation" if args.full_validation else "--multiple-validation-sets"
        raise SnipError(f"{name} cannot be combined with --snip-eval both; use --snip-eval map or bf16")


def share(value: torch.Tensor | None, device: torch.device) -> float | None:
    """The mean of what the ranks have that hold ``value``; None where none does. Collective over all ranks."""
    pair = torch.zeros(2, dtype=torch.float64, device=device)
    if value is not None:
        pair[0], pair[1] = float(value), 1.0
    dist.all_reduce(pair)
    total, count = pair.tolist()
    return total / count if count else None


class Evaluation:
    """Wraps Megatron's ``evaluate``.

    Args:
        mode: ``--snip-eval``.
        args: Megatron's arguments.
        context: the linears' shared state.
        record: told the losses, {"map": …} and / or {"bf16": …}, on every rank.
    """

    def __init__(self, mode: str, args: argparse.Namespace, context: StepContext, record: Record) -> None:
        self._mode = mode
        self._args = args
        self._context = context
        self._record = record

    def wrap(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """The wrapped ``evaluate``."""

        def evaluate_with_snip(forward_step_func: Any, data_iterator: Any, model: Any, *rest: Any, **named: Any) -> Any:
            bf16_loss = None
            if self._mode == "both":
                consumed = self._args.consumed_valid_samples
                batches = compat.peek(data_iterator, self._microbatches(named.get("eval_iters")))
                self._context.bf16_eval = True
                try:
                    losses, _, out_of_time = evaluate(forward_step_func, batches.iterator(), model, *rest, **named)
                finally:
                    self._context.bf16_eval = False
                    self._args.consumed_valid_samples = consumed  # the same samples come again
                if out_of_time:
                    return losses, None, True
                bf16_loss = losses.get(_LOSS)
            result = evaluate(forward_step_func, data_iterator, model, *rest, **named)
            losses, _, out_of_time = result
            if not out_of_time:
                if bf16_loss is not None:
                    losses[BF16_LOSS] = bf16_loss
                self._report(losses, model)
            return result

        return evaluate_with_snip

    def _microbatches(self, eval_iters: int | None) -> int:
        args = self._args
        iters = args.eval_iters if eval_iters is None else eval_iters
        return int(iters * (args.eval_global_batch_size // (args.eval_micro_batch_size * args.data_parallel_size)))

    def _report(self, losses: dict[str, torch.Tensor], model: Any) -> None:
        device = next(model[0].parameters()).device
        names = {_LOSS: "bf16" if self._mode == "bf16" else "map"}
        if self._mode == "both":
            names[BF16_LOSS] = "bf16"
        shared = {label: share(losses.get(name), device) for name, label in names.items()}
        self._record({label: value for label, value in shared.items() if value is not None})

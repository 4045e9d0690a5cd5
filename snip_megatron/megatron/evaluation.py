"""Validation in the formats of the map, in bf16, or in both on the same batches (``--snip-eval``)."""

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from snip_megatron.layers.context import StepContext
from snip_megatron.megatron import compat
from snip_megatron.megatron.graphs import GraphedRun

_LOSS = "lm loss"
BF16_LOSS = "lm loss in bf16"
"""Name of the bf16 loss in Megatron's log line, TensorBoard and wandb under ``--snip-eval both``."""


def main_loss(losses: dict[str, torch.Tensor] | None) -> torch.Tensor | None:
    """Return the loss that SNIP watches: ``lm loss``, or the first one of a script that reports others.

    Returns None if there is none, as on all pipeline stages but the last.
    """
    return losses.get(_LOSS, next(iter(losses.values()))) if losses else None


def mean_over_ranks(value: torch.Tensor | None, device: torch.device) -> float | None:
    """Return the mean of ``value`` over the ranks where it is not None. Collective over all ranks.

    Returns None if ``value`` is None on every rank.
    """
    pair = torch.zeros(2, dtype=torch.float64, device=device)
    if value is not None:
        pair[0], pair[1] = float(value), 1.0
    dist.all_reduce(pair)
    total, count = pair.tolist()
    return total / count if count else None


@dataclass
class Evaluation:
    """Wraps Megatron's ``evaluate``."""

    mode: str  # value of ``--snip-eval``: map, bf16 or both
    args: argparse.Namespace
    context: StepContext
    # called on every rank with the computed losses under the keys "map" and "bf16", and with ``kind``, which is
    # ``validation`` or ``test``. If there are several validation sets, ``set`` is the name or the index
    record: Callable[..., None]
    graphs: GraphedRun  # CUDA graphs of the training steps. Validation runs without them
    _kind: str = "validation"
    _sets: Iterator[Any] = field(default_factory=lambda: iter(()))

    def begin(self, prefix: str) -> None:
        """Remember which sets Megatron evaluates next. See :func:`compat.evaluations_watched`."""
        self._kind = "test" if prefix.endswith("test set") else "validation"
        several = self.args.multiple_validation_sets and self._kind == "validation"
        self._sets = iter((getattr(self.args, "validation_set_names", None) or itertools.count()) if several else ())

    def wrap(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate_with_snip(forward_step: Any, data_iterator: Any, model: Any, *inputs: Any, **named: Any) -> Any:
            args, local = self.args, dict[str, torch.Tensor | None]()
            with self.graphs.bypassed(model):
                if self.mode == "both":
                    ranks = args.eval_micro_batch_size * args.data_parallel_size
                    iters = args.eval_iters if named.get("eval_iters") is None else named["eval_iters"]
                    microbatches = range(iters * (args.eval_global_batch_size // ranks))
                    batches = compat.repeated(data_iterator, microbatches)
                    with (
                        compat.changed(self.context, bf16_eval=True),
                        # the second validation uses the same samples
                        compat.changed(args, consumed_valid_samples=args.consumed_valid_samples),
                    ):
                        losses, _, out_of_time = evaluate(forward_step, batches, model, *inputs, **named)
                    if out_of_time:
                        return losses, None, True
                    local["bf16"] = main_loss(losses)
                result = evaluate(forward_step, data_iterator, model, *inputs, **named)
            losses, _, out_of_time = result
            if not out_of_time:
                local["bf16" if self.mode == "bf16" else "map"] = main_loss(losses)
                if self.mode == "both" and local["bf16"] is not None:
                    losses[BF16_LOSS] = local["bf16"]
                device = next(model[0].parameters()).device
                means = {label: mean_over_ranks(loss, device) for label, loss in local.items()}
                name = next(self._sets, None)
                which = {} if name is None else {"set": str(name)}
                self.record({key: mean for key, mean in means.items() if mean is not None}, kind=self._kind, **which)
            return result

        return evaluate_with_snip

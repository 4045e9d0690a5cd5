"""Runs Megatron's ``pretrain`` for GPT models with this package's data sets, forward step and loss, and with SNIP."""

import argparse
import functools
import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import StragglerDetector, get_attr_wrapped_model
from megatron.training import get_args, get_timers

from snip_megatron.megatron import compat
from snip_megatron.megatron.attachment import prepare_megatron, prepare_run
from snip_megatron.megatron.compat import pretraining
from snip_megatron.megatron.datasets import check_data, get_batch, packed_documents, provide_datasets
from snip_megatron.megatron.startup import Startup
from snip_megatron.megatron.validate import check_layers_of_experts
from snip_megatron.precision.errors import SnipError, with_suggestion
from snip_megatron.runtime.agreement import Terms, of_launcher, together
from snip_megatron.runtime.config import add_arguments as add_snip_arguments

#: A loss this many times the largest seen before is suspicious (Megatron's --check-for-spiky-loss).
SPIKY_LOSS_FACTOR = 10

_stimer = StragglerDetector()


def run(startup: Startup) -> None:
    """Train as ``sys.argv`` says. All ranks raise SnipError if the configuration cannot work on one of them."""
    together(functools.partial(prepare, startup), of_launcher())()


def prepare(startup: Startup) -> tuple[Callable[[], None], Terms]:
    """Check the configuration, before any collective is called.

    Returns a function that trains as ``sys.argv`` says, and what must be equal on all ranks. Raises SnipError if the
    configuration cannot work.
    """
    args = pretraining.parse_arguments(functools.partial(provide_arguments, startup))
    if not (args.fake_process_group or os.environ.get("MASTER_ADDR")):
        raise SnipError(
            "a launcher must start this: torchrun --nproc-per-node 1 -m snip_megatron.pretrain_gpt <arguments>"
        )
    check_data(args)
    check_layers_of_experts(args)
    prepare_megatron(args, startup)
    model_config = pretraining.model_config(args)
    under_snip, terms = prepare_run(args)

    def train() -> None:
        with under_snip(model_config):
            pretraining.pretrain(args, model_config, provide_datasets=provide_datasets, forward_step=forward_step)
        # NCCL destroys a communicator only after all CUDA graphs that contain its collectives, and these graphs live
        # until the process ends. With graphs, the process therefore ends with its process groups, as Megatron's own do.
        if torch.distributed.is_initialized() and compat.graph_implementation(args) is None:
            torch.distributed.destroy_process_group()

    return train, terms


# -- arguments -------------------------------------------------------------------------------------------------
def provide_arguments(startup: Startup, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add SNIP's arguments and set defaults for this machine."""

    def refuse(message: str) -> NoReturn:
        raise SnipError(with_suggestion(message, parser._option_string_actions))

    parser.error = refuse  # type: ignore[method-assign]  # one line instead of 1,000 lines of usage
    parser.set_defaults(tokenizer_type="GPT2BPETokenizer")  # as Megatron's pretrain_gpt.py has it
    compat.set_defaults(parser, startup)
    return add_snip_arguments(parser)


# -- step ------------------------------------------------------------------------------------------------------
LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]


def forward_step(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, LossFunction]:
    """Run one microbatch through one model chunk. Returns the output and a function that computes its loss.

    If ``return_schedule_plan``, nothing runs yet, and the output is Megatron's plan of the parts of layers
    (``--overlap-moe-expert-parallel-comm``).
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with _stimer(bdata=True):
        vp_stage = get_attr_wrapped_model(model, "vp_stage")
        batch = get_batch(get_args(), data_iterator, training=model.training, vp_stage=vp_stage)
        packed = packed_documents(get_args(), batch)
    timers("batch-generator").stop()
    with _stimer:
        run = model.build_schedule_plan if return_schedule_plan else model
        output = run(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
            packed_seq_params=packed,
        )
    # loss_mask is None on middle pipeline stages, where the loss function is not called.
    return output, functools.partial(loss_function, batch["loss_mask"])


def loss_function(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum the token losses of a microbatch under its mask.

    Returns:
        The sum (fp32 scalar), the number of tokens (int scalar), and ``{"lm loss": fp32 [sum, tokens]}``. Megatron
        divides the sum by the tokens over microbatches and data parallel ranks.
    """
    mask = loss_mask.reshape(-1).float()
    loss = (output.reshape(-1).float() * mask).sum()
    tokens = mask.sum().detach().to(torch.int)
    _validate(loss)
    return loss, tokens, {"lm loss": torch.stack((loss.detach(), tokens.to(loss.dtype)))}


def _validate(loss: torch.Tensor) -> None:
    """Pass the loss to Megatron's rerun machine, which attributes NaN, Inf and spikes to hardware or data."""
    args, machine = get_args(), get_rerun_state_machine()
    validate = functools.partial(machine.validate_result, result=loss, tolerance=0.0)
    if args.check_for_nan_in_loss_and_grad:
        for rejects, kind in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            validate(rejection_func=rejects, message=f"{kind} in the local forward loss", fatal=True)
    if args.check_for_spiky_loss:
        spiky = functools.partial(machine.is_unexpectedly_large, threshold=SPIKY_LOSS_FACTOR, context="loss")
        validate(rejection_func=spiky, message="spiky local forward loss", fatal=False)

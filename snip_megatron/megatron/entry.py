"""Megatron's ``pretrain`` for GPT models (Llama), with our data sets, forward step and loss, and SNIP when asked."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import StragglerDetector, get_attr_wrapped_model
from megatron.training import get_args, get_timers, get_tokenizer, inprocess_restart, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from snip_megatron.config import SnipConfig
from snip_megatron.config import add_arguments as add_snip_arguments
from snip_megatron.errors import SnipError
from snip_megatron.megatron import compat
from snip_megatron.megatron.batch import get_batch, makes_attention_mask
from snip_megatron.megatron.startup import Startup, is_rank_zero

#: A loss this many times the largest seen before is suspicious (Megatron's --check-for-spiky-loss).
SPIKY_LOSS_FACTOR = 10

_stimer = StragglerDetector()


def run(startup: Startup) -> None:
    """Train as ``sys.argv`` says. Raises SnipError on a configuration that cannot work, before any communication."""
    args = parse_arguments(startup)
    config = SnipConfig.from_args(args)
    model_config = gpt_config_from_args(args)
    with contextlib.ExitStack() as stack:
        if config.enabled:
            from snip_megatron.megatron.setup import install

            snip = install(config, args=args)
            stack.push(snip.leave)
            snip.prepare_model(model_config)
        _pretrain(args, model_config)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _pretrain(args: argparse.Namespace, model_config: Any) -> None:
    wrapped_pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    wrapped_pretrain(
        cfg_container=pretrain_cfg_container_from_args(args, model_config),
        train_valid_test_dataset_provider=provide_datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        store=store,
    )


# -- arguments -------------------------------------------------------------------------------------------------
def parse_arguments(startup: Startup) -> argparse.Namespace:
    """Megatron's validated arguments plus ours, with the compat sets applied and shown. Raises SnipError."""
    shown: list[str] = []

    def provide_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.error = _raise_error  # type: ignore[method-assign]  # one line, not 1,000 of usage
        shown.extend(compat.set_defaults(parser, startup))
        return add_snip_arguments(parser)

    try:
        args: argparse.Namespace = parse_and_validate_args(provide_arguments)
    except AssertionError as error:
        if not str(error):
            raise
        raise SnipError(f"Megatron refuses the arguments: {error}") from error
    compat.check(args, startup)
    _check_data(args)
    shown.extend(compat.apply(args, startup))
    if is_rank_zero():
        for line in shown:
            print(f"compat: {line}", flush=True)
    return args


def _raise_error(message: str) -> NoReturn:
    raise SnipError(message)


def _check_data(args: argparse.Namespace) -> None:
    paths = (args.data_path, args.train_data_path, args.data_args_path, args.per_split_data_args_path)
    if not args.mock_data and not any(paths):
        raise SnipError("no training data: give --data-path, --train-data-path or --mock-data")
    for name in ("sft", "hybrid_layer_pattern", "fim_data"):
        if getattr(args, name, None):
            raise SnipError(f"--{name.replace('_', '-')} is not supported by this entry: it pretrains GPT models")


# -- data ------------------------------------------------------------------------------------------------------
def provide_datasets(samples: tuple[int, int, int], vp_stage: int | None = None) -> Any:
    """Train, validation and test data sets of ``samples`` sequences; built where they are read."""
    args = get_args()
    kind = MockGPTDataset if args.mock_data else GPTDataset
    builder = BlendedMegatronDatasetBuilder(
        kind, samples, functools.partial(_reads_data, vp_stage), dataset_config(args)
    )
    return builder.build()


provide_datasets.is_distributed = True  # type: ignore[attr-defined]  # each rank asks for itself


def _reads_data(vp_stage: int | None) -> bool:
    return mpu.get_tensor_model_parallel_rank() == 0 and bool(is_first_or_last_pipeline_stage(vp_stage))


def dataset_config(args: argparse.Namespace) -> GPTDatasetConfig:
    """The data sets' configuration, from Megatron's arguments of the same names and those named differently."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    fields = {f.name for f in dataclasses.fields(GPTDatasetConfig) if f.init}
    values = {name: getattr(args, name) for name in fields if hasattr(args, name)}
    values |= {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "split": None if blend_per_split is not None and any(blend_per_split) else args.split,
        "num_dataset_builder_threads": args.num_dataset_builder_threads,
        "path_to_cache": args.data_cache_path,
        "mmap_bin_files": args.mmap_bin_files,
        "tokenizer": get_tokenizer(),
        "create_attention_mask": makes_attention_mask(args),
    }
    return GPTDatasetConfig(**values)


# -- step ------------------------------------------------------------------------------------------------------
LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]


def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
    """One microbatch through one model chunk: its output, and what turns the last stage's output into the loss."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with _stimer(bdata=True):
        at_end = is_first_or_last_pipeline_stage(get_attr_wrapped_model(model, "vp_stage"))
        batch = get_batch(data_iterator, training=model.training, at_pipeline_end=at_end)
    timers("batch-generator").stop()
    with _stimer:
        output = model(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )
    # None only where the pipeline does not end, and nobody calls it.
    return output, functools.partial(loss_function, cast(torch.Tensor, batch["loss_mask"]))


def loss_function(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the token losses under ``loss_mask``, number of tokens, and what is reported.

    ``output`` and ``loss_mask`` are [microbatch, sequence]. Returns (fp32 scalar, int scalar,
    ``{"lm loss": fp32 [sum, tokens]}``); Megatron divides, over microbatches and data-parallel ranks.
    """
    mask = loss_mask.reshape(-1).float()
    loss = (output.reshape(-1).float() * mask).sum()
    tokens = mask.sum().detach().to(torch.int)
    _validate(loss)
    return loss, tokens, {"lm loss": torch.stack((loss.detach(), tokens.to(loss.dtype)))}


def _validate(loss: torch.Tensor) -> None:
    """Hand the loss to Megatron's rerun machine, which attributes NaN, Inf and spikes to hardware or data."""
    args = get_args()
    machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for rejects, kind in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            machine.validate_result(
                result=loss,
                rejection_func=rejects,
                message=f"{kind} in the local forward loss",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        machine.validate_result(
            result=loss,
            rejection_func=functools.partial(
                machine.is_unexpectedly_large, threshold=SPIKY_LOSS_FACTOR, context="loss"
            ),
            message="spiky local forward loss",
            tolerance=0.0,
            fatal=False,
        )

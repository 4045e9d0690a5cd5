"""Starts the installed version of Megatron: parses arguments, configures the model and calls ``pretrain``.

Version 0.19 takes a configuration container that holds the model's configuration and its hooks. Version 0.18 takes the
container and a function that builds a model chunk. Version 0.17 takes that function and parses the command line itself.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import megatron.training.arguments as arguments
from megatron.core.enums import ModelType
from megatron.training import global_vars, inprocess_restart
from megatron.training import pretrain as megatron_pretrain

from snip_megatron.errors import SnipError
from snip_megatron.megatron.compat.versions import MEGATRON_VERSION

ArgumentsProvider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def current_arguments(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments that Megatron trains with, once training has begun.

    Megatron 0.17 parses the command line a second time, and completes its own result (``padded_vocab_size``) alone.
    """
    if MEGATRON_VERSION >= (0, 18):
        return args
    found: argparse.Namespace = global_vars.get_args()
    return found


def parse_arguments(
    provide_arguments: ArgumentsProvider, defaults: Mapping[str, Any] = MappingProxyType({})
) -> argparse.Namespace:
    """Parse and validate Megatron's arguments from ``sys.argv``. Raises SnipError with Megatron's message.

    Args:
        provide_arguments: Adds arguments to Megatron's parser.
        defaults: Defaults of a script in place of Megatron's, by name.
    """
    with _refusals():
        if MEGATRON_VERSION >= (0, 18):
            args: argparse.Namespace = arguments.parse_and_validate_args(
                provide_arguments, args_defaults=dict(defaults)
            )
        else:
            args = arguments.parse_args(provide_arguments)
            if args.use_checkpoint_args:
                from megatron.training.checkpointing import load_args_from_checkpoint

                load_args_from_checkpoint(args)
            arguments.validate_args(args, dict(defaults))
    return args


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Raise SnipError in place of what Megatron raises for arguments that it refuses."""
    try:
        yield
    except (AssertionError, ValueError) as error:
        failed = traceback.extract_tb(error.__traceback__)[-1]  # says which condition, if the error says nothing
        said = " ".join(str(error).split()) or f"{failed.line} ({Path(failed.filename).name}:{failed.lineno})"
        raise SnipError(f"Megatron refuses the arguments: {said}") from error
    except ImportError as error:  # a tokenizer's or a logger's package; the rank that needs it finds it missing
        raise SnipError(
            f"Megatron cannot import what the arguments ask for: {error}; snip doctor lists the packages,"
            " pip install 'snip_megatron[all]' brings them"
        ) from error


def model_config(args: argparse.Namespace, *, on_cpu: bool) -> Any:
    """Return the configuration of the GPT model. The caller may change it and passes it to :func:`pretrain`.

    On every version it has ``pre_wrap_hooks`` and ``transformer_layer_spec``. A hook takes the list of this rank's
    model chunks and returns the list to use, before the chunks are moved to the GPU, cast to 16 bits and wrapped by
    DDP. The layer spec is None, a spec, or a function of this configuration that returns one.

    Raises:
        SnipError: If Megatron refuses the arguments.
    """
    with _refusals():
        if MEGATRON_VERSION >= (0, 19):
            from megatron.training.argument_utils import gpt_config_from_args

            model = gpt_config_from_args(args)
        else:
            from snip_megatron.megatron.compat.legacy_model import LegacyModelConfig

            model = LegacyModelConfig.from_args(args)
    if on_cpu:
        # Schedules free an output as soon as its send is queued, which is safe on a CUDA stream. gloo reads the memory
        # later: under an interleaved pipeline the next stage received what was written there in the meantime.
        model.transformer.deallocate_pipeline_outputs = False
    return model


def _start(args: argparse.Namespace, **parameters: Any) -> None:
    """Call Megatron's ``pretrain``. An in-process restart calls this again after destroying the global state.

    Since 0.18 ``pretrain`` expects the global arguments to be set, so a restart must set them first.
    """
    if MEGATRON_VERSION >= (0, 18) and global_vars._GLOBAL_ARGS is None:
        global_vars.set_global_variables(args)
    megatron_pretrain(**parameters)


def pretrain(
    args: argparse.Namespace,
    model: Any,
    *,
    provide_arguments: ArgumentsProvider,
    provide_datasets: Callable[..., Any],
    forward_step: Callable[..., Any],
) -> None:
    """Run Megatron's training loop.

    Args:
        args: Megatron's validated arguments.
        model: Result of :func:`model_config`.
        provide_arguments: The function that ``args`` were parsed with; 0.17 parses the command line again.
        provide_datasets: Builds the train, validation and test data sets.
        forward_step: Runs one microbatch through a model chunk.
    """
    run, store = inprocess_restart.maybe_wrap_for_inprocess_restart(functools.partial(_start, args))
    parameters: dict[str, Any] = {
        "train_valid_test_dataset_provider": provide_datasets,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
        "store": store,
    }
    if MEGATRON_VERSION >= (0, 18):
        from megatron.training.argument_utils import pretrain_cfg_container_from_args

        config = model if MEGATRON_VERSION >= (0, 19) else None
        parameters["cfg_container"] = pretrain_cfg_container_from_args(args, config)
    else:
        parameters["extra_args_provider"] = provide_arguments
    if MEGATRON_VERSION < (0, 19):
        parameters["model_provider"] = model.provide
    run(**parameters)

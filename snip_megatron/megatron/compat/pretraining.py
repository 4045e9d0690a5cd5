"""How this version of Megatron is started: arguments, model, ``pretrain``.

0.19 takes a configuration container with the model's configuration and its hooks; 0.18 the container and a function
that builds a model chunk; 0.17 that function, and it parses the command line itself.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import megatron.training.arguments as arguments
from megatron.core.enums import ModelType
from megatron.training import global_vars, inprocess_restart
from megatron.training import pretrain as megatron_pretrain

from snip_megatron.errors import SnipError
from snip_megatron.megatron.compat.versions import MEGATRON_VERSION

ArgumentsProvider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def parse_arguments(provide_arguments: ArgumentsProvider) -> argparse.Namespace:
    """Megatron's validated arguments from ``sys.argv``. Raises SnipError with its message where it has one."""
    try:
        if MEGATRON_VERSION >= (0, 18):
            args: argparse.Namespace = arguments.parse_and_validate_args(provide_arguments)
        else:
            args = arguments.parse_args(provide_arguments)
            if args.use_checkpoint_args:
                from megatron.training.checkpointing import load_args_from_checkpoint

                load_args_from_checkpoint(args)
            arguments.validate_args(args)
    except (AssertionError, ValueError) as error:
        if not str(error):
            raise
        raise SnipError(f"Megatron refuses the arguments: {error}") from error
    return args


def model_config(args: argparse.Namespace, *, on_cpu: bool) -> Any:
    """The GPT model's configuration, to be changed and given to :func:`pretrain`.

    On every version it has ``pre_wrap_hooks`` (functions from the list of this rank's model chunks to the list to
    be used, before the move to the GPU, 16-bit weights and DDP) and ``transformer_layer_spec`` (None, a spec, or a
    function of this configuration that returns one).
    """
    if MEGATRON_VERSION >= (0, 19):
        from megatron.training.argument_utils import gpt_config_from_args

        model = gpt_config_from_args(args)
    else:
        from snip_megatron.megatron.compat.legacy_model import LegacyModelConfig

        model = LegacyModelConfig.from_args(args)
    if on_cpu:
        # Schedules free an output as soon as its send is queued, which is safe on a CUDA stream. gloo sends from the
        # memory itself: under an interleaved pipeline the next stage read what came after.
        model.transformer.deallocate_pipeline_outputs = False
    return model


def _start(args: argparse.Namespace, **parameters: Any) -> None:
    """Megatron's ``pretrain``, which an in-process restart calls again after it has destroyed the global state.

    From 0.18 on it takes the global arguments as given, and so never restarts without them.
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
    """Run Megatron's training loop on ``model``, a :func:`model_config`.

    ``provide_arguments`` must be what ``args`` were parsed with: 0.17 parses again.
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

"""Starts Megatron: parses arguments, configures the model and calls ``pretrain``."""

from __future__ import annotations

import argparse
import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megatron.training.argument_utils as argument_utils
import megatron.training.arguments as arguments
from megatron.core.enums import ModelType
from megatron.training import global_vars, inprocess_restart
from megatron.training import pretrain as megatron_pretrain

from snip_megatron.errors import SnipError

ArgumentsProvider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def parse_arguments(provide_arguments: ArgumentsProvider) -> argparse.Namespace:
    """Parse and validate Megatron's arguments from ``sys.argv``. Raises SnipError with Megatron's message.

    Args:
        provide_arguments: Adds arguments to Megatron's parser.
    """
    with _refusals():
        args: argparse.Namespace = arguments.parse_and_validate_args(provide_arguments)
    return args


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Raise SnipError in place of what Megatron raises for arguments that it refuses."""
    try:
        yield
    except SnipError:
        raise
    except ImportError as error:  # a tokenizer's or a logger's package; the rank that needs it finds it missing
        raise SnipError(
            f"Megatron cannot import what the arguments ask for: {error}; snip doctor lists the packages,"
            " pip install 'snip_megatron[all]' brings them"
        ) from error
    except Exception as error:  # Megatron asserts, and evaluates patterns of layers
        failed = traceback.extract_tb(error.__traceback__)[-1]  # says which condition, if the error does not
        place = f"{failed.line} ({Path(failed.filename).name}:{failed.lineno})"
        said = " ".join(str(error).split())
        if not isinstance(error, AssertionError | ValueError | RuntimeError):
            said = f"{type(error).__name__}: {said}: {place}"
        raise SnipError(f"Megatron refuses the arguments: {said or place}") from error


def model_config(args: argparse.Namespace, *, on_cpu: bool) -> Any:
    """Return the configuration of the GPT model. The caller may change it and passes it to :func:`pretrain`.

    It has ``pre_wrap_hooks`` and ``transformer_layer_spec``. A hook takes the list of this rank's
    model chunks and returns the list to use, before the chunks are moved to the GPU, cast to 16 bits and wrapped by
    DDP. The layer spec is None, a spec, or a function of this configuration that returns one.

    Raises:
        SnipError: If Megatron refuses the arguments.
    """
    with _refusals():
        model = argument_utils.gpt_config_from_args(args)
    if on_cpu:
        # Schedules free an output as soon as its send is queued, which is safe on a CUDA stream. gloo reads the memory
        # later: under an interleaved pipeline the next stage received what was written there in the meantime.
        model.transformer.deallocate_pipeline_outputs = False
    return model


def _start(args: argparse.Namespace, **parameters: Any) -> None:
    """Call Megatron's ``pretrain``. An in-process restart calls this again after destroying the global state.

    ``pretrain`` expects the global arguments to be set, so a restart must set them first.
    """
    if global_vars._GLOBAL_ARGS is None:
        global_vars.set_global_variables(args)
    megatron_pretrain(**parameters)


def pretrain(
    args: argparse.Namespace,
    model: Any,
    *,
    provide_datasets: Callable[..., Any],
    forward_step: Callable[..., Any],
) -> None:
    """Run Megatron's training loop.

    Args:
        args: Megatron's validated arguments.
        model: Result of :func:`model_config`.
        provide_datasets: Builds the train, validation and test data sets.
        forward_step: Runs one microbatch through a model chunk.
    """
    run, store = inprocess_restart.maybe_wrap_for_inprocess_restart(functools.partial(_start, args))
    run(
        cfg_container=argument_utils.pretrain_cfg_container_from_args(args, model),
        train_valid_test_dataset_provider=provide_datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        store=store,
    )

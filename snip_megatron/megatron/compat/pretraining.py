"""Starts Megatron: parses arguments, configures the model, calls ``pretrain``, and takes a script's own call of it.

A call takes a configuration container that may hold the model's configuration, or a model provider beside it.
"""

import argparse
import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import megatron.training.argument_utils as argument_utils
import megatron.training.arguments as arguments
import megatron.training.training as training
from megatron.core import optimizer_param_scheduler
from megatron.core.enums import ModelType
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.training import global_vars, inprocess_restart
from megatron.training import pretrain as megatron_pretrain

from snip_megatron.megatron.compat.megatron_precision import let_snip_choose
from snip_megatron.megatron.compat.versions import changed
from snip_megatron.precision.errors import SnipError

ArgumentsProvider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def parse_arguments(provide_arguments: ArgumentsProvider) -> argparse.Namespace:
    """Parse and validate Megatron's arguments from ``sys.argv``. Raises SnipError with Megatron's message."""
    with _refusals():
        args: argparse.Namespace = arguments.parse_and_validate_args(
            lambda parser: let_snip_choose(provide_arguments(parser))
        )
    return args


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Replace what Megatron raises for arguments that it refuses by SnipError."""
    try:
        yield
    except SnipError:
        raise
    except ImportError as error:  # of a tokenizer or a logger, on the rank that needs it
        raise SnipError(
            f"Megatron cannot import what the arguments ask for: {error}; snip doctor lists the packages,"
            " pip install 'snip_megatron[all]' brings them"
        ) from error
    except Exception as error:  # Megatron asserts, and evaluates patterns of layers
        failed = traceback.extract_tb(error.__traceback__)[-1]  # shows the condition of an assert without a message
        place = f"{failed.line} ({Path(failed.filename).name}:{failed.lineno})"
        message = " ".join(str(error).split())
        if not isinstance(error, AssertionError | ValueError | RuntimeError):
            message = f"{type(error).__name__}: {message}: {place}"
        raise SnipError(f"Megatron refuses the arguments: {message or place}") from error


def model_config(args: argparse.Namespace) -> Any:
    """Return the configuration of the GPT or hybrid model. The caller may change it and passes it to :func:`pretrain`.

    Its ``pre_wrap_hooks`` take the list of this rank's model chunks and return the list to use, before the chunks are
    moved to the GPU, cast to 16 bits and wrapped by DDP. Raises SnipError if Megatron refuses the arguments.
    """
    with _refusals():
        hybrid = getattr(args, "hybrid_layer_pattern", None) is not None
        make = argument_utils.hybrid_config_from_args if hybrid else argument_utils.gpt_config_from_args
        return make(args)


def _start(args: argparse.Namespace, **parameters: Any) -> None:
    """Call Megatron's ``pretrain``, which expects the global arguments to be set.

    An in-process restart calls this again after it has destroyed the global state.
    """
    if global_vars._GLOBAL_ARGS is None:
        global_vars.set_global_variables(args)
    megatron_pretrain(**parameters)


def pretrain(
    args: argparse.Namespace, model: Any, *, provide_datasets: Callable[..., Any], forward_step: Callable[..., Any]
) -> None:
    """Run Megatron's training loop.

    ``model`` is the result of :func:`model_config`. Raises SnipError if Megatron refuses the learning rate's schedule.
    """
    run, store = inprocess_restart.maybe_wrap_for_inprocess_restart(functools.partial(_start, args))
    try:
        run(
            cfg_container=argument_utils.pretrain_cfg_container_from_args(args, model),
            train_valid_test_dataset_provider=provide_datasets,
            model_type=ModelType.encoder_or_decoder,
            forward_step_func=forward_step,
            store=store,
            get_embedding_ranks=functools.partial(_embedding_ranks, model.transformer, args),
        )
    except AssertionError as error:
        failed = traceback.extract_tb(error.__traceback__)[-1]
        if failed.filename != optimizer_param_scheduler.__file__:
            raise
        choose = "--override-opt-param-scheduler keeps this one, --use-checkpoint-opt-param-scheduler the checkpoint's"
        message = f"{error}; {choose}" if str(error) else failed.line
        raise SnipError(f"Megatron refuses the learning rate's schedule: {message}") from error


def _embedding_ranks(config: Any, args: argparse.Namespace, ranks: list[int]) -> list[int]:
    """Return the ranks of a pipeline that have a copy of the embedding.

    Besides the first rank, these are the ranks that predict further tokens and the rank of an output layer with tied
    weights.
    """
    tied = [] if args.untie_embeddings_and_output_weights else [ranks[-1]]
    return sorted({ranks[0], *tied, *get_mtp_ranks(ranks, config)})


def bound_call(positional: Sequence[Any], named: Mapping[str, Any]) -> inspect.BoundArguments:
    """Return the arguments of a script's call of ``pretrain``, by name. Raises SnipError if Megatron's takes others."""
    try:
        return inspect.signature(training.pretrain).bind(*positional, **named)
    except TypeError as error:
        raise SnipError(f"attach(): Megatron's pretrain() cannot be called like this: {error}") from error


def parsed_arguments() -> argparse.Namespace:
    """Return Megatron's validated arguments, which the script parsed. Raises SnipError if it did not."""
    if global_vars._GLOBAL_ARGS is None:
        raise SnipError("attach(): pretrain() was called before the script parsed Megatron's arguments")
    args: argparse.Namespace = global_vars._GLOBAL_ARGS
    return args


@contextmanager
def hooked_model(call: inspect.BoundArguments) -> Iterator[Any]:
    """Yield the object in a script's call whose ``pre_wrap_hooks`` run, and restore its hooks after this context.

    It is the configuration of the model, or a :class:`HookedProvider` that replaces the script's model provider in the
    call. Raises SnipError if the call has neither.
    """
    arguments = call.arguments
    model = getattr(arguments.get("cfg_container"), "model", None)
    if model is None:
        if arguments.get("model_provider") is None:
            raise SnipError("attach(): pretrain() got neither a model configuration nor a model_provider")
        model = arguments["model_provider"] = HookedProvider(arguments["model_provider"])
    with changed(model, pre_wrap_hooks=[*model.pre_wrap_hooks]):
        yield model


class HookedProvider:
    """A script's own model provider, with the hooks of Megatron's model configuration.

    Attributes:
        pre_wrap_hooks: Functions that are called once with all chunks of this rank, when the last one is built. They
            may only change chunks in place.
    """

    def __init__(self, provide: Callable[..., Any]) -> None:
        self.pre_wrap_hooks: list[Callable[[list[Any]], list[Any]]] = []
        self._provide = provide
        self._chunks: list[Any] = []
        functools.update_wrapper(self, provide)  # Megatron may look at the signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build one model chunk. Raises SnipError if a hook replaces chunks."""
        chunk = self._provide(*args, **kwargs)
        self._chunks.append(chunk)
        if len(self._chunks) == (global_vars.get_args().virtual_pipeline_model_parallel_size or 1):
            chunks, self._chunks = self._chunks, []
            for hook in self.pre_wrap_hooks:
                if any(a is not b for a, b in zip(hook(chunks), chunks, strict=True)):
                    raise SnipError("a pre-wrap hook replaced a model chunk, which a model provider does not allow")
        return chunk

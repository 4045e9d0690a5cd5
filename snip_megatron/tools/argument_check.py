"""Checks all arguments of a job in one process, before any rank is started, and builds its model without memory.

The process parses and validates Megatron's and SNIP's arguments as the last of the job's ranks would. It starts no
process group and reads only the names of data files.
"""

import functools
import importlib.util
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from snip_megatron.planner.layout import Layout
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.config import parse_snip_arguments


@dataclass(frozen=True)
class Training:
    """A training, as Megatron and SNIP read its arguments."""

    # what a rank runs, read from the model on torch's meta device. The vocabulary is 0 if the tokenizer decides it. If
    # the model cannot be built on this machine, the reason as text
    layout: Layout | str
    recipe: tuple[str, ...] = ()  # formats of Megatron's own FP8 or FP4, the candidates of SNIP where none are named
    train_iters: int | None = None  # number of training steps. None if it is not known


def check_arguments(arguments: Sequence[str], ranks: int, variables: Mapping[str, str]) -> Training:
    """Check the arguments of a training with ``ranks`` ranks in a new process, because Megatron keeps global state.

    ``variables`` are environment variables of its ranks. Raises SnipError if Megatron or SNIP refuses the arguments.
    """
    # Rank 0 would print a table of all arguments.
    variables = {**variables, "WORLD_SIZE": str(ranks), "RANK": str(ranks - 1), "LOCAL_RANK": "0"}
    with tempfile.TemporaryDirectory(prefix="snip-check-") as folder:
        output = Path(folder) / "output"
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn, initializer=_become_rank, initargs=(output, variables)) as pool:
            try:
                return pool.submit(_validate, list(arguments)).result()
            except SnipError:
                raise
            except (Exception, SystemExit) as error:
                sys.stderr.write(output.read_text(encoding="utf-8", errors="replace") if output.exists() else "")
                raise SnipError(f"the check of the arguments failed: {error or type(error).__name__}") from None


def _become_rank(output: Path, variables: Mapping[str, str]) -> None:
    """Set the environment of a rank, and keep what libraries print away from the command's own lines.

    This is the last rank, on which Megatron opens the loggers of a training: it must not open any.
    """
    os.environ.update(variables, WANDB_MODE="disabled")
    sys.modules["torch.utils.tensorboard"] = None  # type: ignore[assignment]
    file = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _validate(argv: Sequence[str]) -> Training:
    from snip_megatron.megatron.startup import prepare

    sys.argv[1:] = argv  # which Megatron parses
    startup = prepare(argv, parse_snip_arguments(argv).snip_no_compat)
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "" and importlib.util.find_spec("transformer_engine") is not None:
        startup = replace(startup, on_cpu=False)  # a job for GPUs may be checked where there is none
    from snip_megatron.megatron import compat, validate
    from snip_megatron.megatron.attachment import configuration
    from snip_megatron.megatron.compat import pretraining
    from snip_megatron.megatron.compat.meta_model import CannotBuildError
    from snip_megatron.megatron.conversion import linears_on_meta
    from snip_megatron.megatron.datasets import check_data
    from snip_megatron.megatron.entry import provide_arguments
    from snip_megatron.megatron.times import layout_of

    args = pretraining.parse_arguments(functools.partial(provide_arguments, startup))
    compat.check(args, startup)
    check_data(args)
    validate.check_layers_of_experts(args)
    config, _ = configuration(args)
    if config.enabled:
        validate.check(config, args)
    model = pretraining.model_config(args)  # which checks its sizes
    compat.apply(args, startup)
    layout: Layout | str
    try:
        linears = linears_on_meta(args, model)
    except CannotBuildError as error:
        layout = str(error)
    else:
        if config.enabled:
            validate.check_model(config, args, linears)
        layout = layout_of(args, linears.covered, config)
        vocabulary = layout.model.vocabulary or args.vocab_size or 0
        layout = replace(layout, model=replace(layout.model, vocabulary=vocabulary))
    steps = args.train_iters or (args.train_samples or 0) // args.global_batch_size
    return Training(layout, getattr(args, "snip_recipe", ()), steps or None)

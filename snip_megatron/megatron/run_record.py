"""Opens the run directory of a Megatron run."""

import argparse
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from snip_megatron import __version__
from snip_megatron.megatron import compat
from snip_megatron.megatron.model_linears import ModelLinears
from snip_megatron.megatron.startup import say
from snip_megatron.megatron.times import layout_of, option_times
from snip_megatron.numerics.products import EMULATIONS
from snip_megatron.precision import LinearRow
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.options import given_options
from snip_megatron.runtime.run_directory import RunDirectory
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.timing.table import NoTableError, load_table, packaged_table


def run_folder(config: SnipConfig, args: argparse.Namespace) -> Path | None:
    """Return ``--snip-dir``, or ``<save>/snip``. None if neither is given."""
    if config.dir is not None:
        return Path(config.dir)
    return Path(args.save) / "snip" if args.save else None


def open_run_directory(
    config: SnipConfig,
    args: argparse.Namespace,
    step: int,
    request: SolveRequest,
    linears: ModelLinears,
    backend: str,
    stays: Sequence[str],
) -> RunDirectory | None:
    """Open ``--snip-dir``, or ``<save>/snip``. Returns None if neither is given, and the run then has no record.

    ``backend`` is the name of the GEMM backend, and ``stays`` has a line for each kind of linear that stays in bf16.
    Raises SnipError if the directory cannot be used.
    """
    path = run_folder(config, args)
    if path is None:
        say("no run directory: give --snip-dir (or --save) to keep events, maps and a report")
        return None
    if config.replay is not None and path.resolve() == Path(config.replay).resolve():
        raise SnipError(
            f"--snip-replay {config.replay}: this run would write its record over the one it replays; choose another"
            " --snip-dir"
        )
    # The fields of a run that a resume must not change.
    identity = replace(config, dir=None, overwrite=False, no_compat=()).as_dict()
    if hasattr(args, "snip_first_update") and "first_update" not in given_options(args, SnipConfig):
        identity["first_update"] = SnipConfig.first_update  # that of the run depends on its length, which may change
    schedule = config.phases
    if schedule is not None:
        identity["schedule"] = schedule.to_json().strip()  # and not the name of a file, which may change
    identity |= {
        name: getattr(args, name)
        for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length")
    }
    shapes: dict[str, dict[str, Any]] | None = None  # path in the layer, or name of a linear → its shape on one rank
    with suppress(SnipError):  # the planner may not know the model
        layout = layout_of(args, linears.covered, config)
        shapes = {kind: asdict(layout.shapes[row.name]) for kind, row in layout.kinds.items()}
    facts = {
        "version": __version__,
        "torch": torch.__version__,
        "megatron_core": metadata.version("megatron-core"),
        "host": socket.gethostname(),
        "command": _command(args),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "gemm_backend": backend,
        "batch_size_ramps": compat.batch_size_ramp(args) is not None,
        "world_size": dist.get_world_size(),
        "tensor_parallel": args.tensor_model_parallel_size,
        "pipeline_parallel": args.pipeline_model_parallel_size,
        "data_parallel": args.data_parallel_size,
        "global_batch_size": args.global_batch_size,
        "micro_batch_size": args.micro_batch_size,
        "sequence_parallel": args.sequence_parallel,
        "train_iters": args.train_iters,
        "first_update": config.first_update,
        "schedule": config.schedule,
        "request": request.as_dict(),  # what `snip solve RUN` starts from
        "predicted_times": _predicted_times(config, args, linears.covered, backend),
        "linear_stages": {row.name: row.stage for row in linears.covered},
        "linear_shapes": shapes,  # from which `snip solve --timings` predicts
        "stays_bf16": list(stays),
        "unquantised_flops": {str(stage): flops for stage, flops in linears.uncovered_flops.items()},
    }
    resume = step if args.load or step > 0 else None
    return RunDirectory(path, identity, overwrite=config.overwrite, resume_step=resume, facts=facts)


def _command(args: argparse.Namespace) -> str:
    """Return the command of this job, which loads its own checkpoints."""
    ranks, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    hosts = "--standalone" if ranks == local else f"--nnodes {ranks // local} <rendezvous>"
    words = [word for word in sys.orig_argv[1:] if word != "-u"]
    checkpoints = args.save or args.load or "<checkpoints: this job saves none>"
    return f"torchrun {hosts} --nproc-per-node {local} {shlex.join(words)} --load {checkpoints}"


def _predicted_times(
    config: SnipConfig, args: argparse.Namespace, linears: Sequence[LinearRow], backend: str
) -> Mapping[str, Any] | None:
    """Return the predicted times with which the report compares measured speedups.

    Returns None if the run's request has times or will measure them, or if they are not known. A line says why they are
    not known, unless there is no table for this GPU: the budget needs no times, so that training continues.
    """
    if config.budget.timed or backend in EMULATIONS:
        return None
    device = torch.cuda.get_device_name()
    try:
        times = option_times(config, args, linears, load_table(packaged_table(device), device))
        return None if times is None else times.as_dict()
    except NoTableError:
        return None
    except SnipError as error:
        say(f"the report will have no predicted times: {error}")
        return None

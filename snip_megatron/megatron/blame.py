"""``--snip-blame STEP``: the verdict about steps of a Megatron job, in place of its training.

The job loads a checkpoint from before the step as in a resume, and reads its data in the same order. It trains and
saves nothing, and ends with exit code 0. A step is the iteration that Megatron prints, counted from 1.
"""

import argparse
import dataclasses
import functools
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from snip_megatron.layers.registry import LinearRegistry, load_map
from snip_megatron.megatron import compat
from snip_megatron.megatron.host import MegatronStep, StepCall
from snip_megatron.megatron.remedy import RemedyWriter
from snip_megatron.megatron.run_record import run_folder
from snip_megatron.megatron.startup import say
from snip_megatron.megatron.state_check import state_checked
from snip_megatron.megatron.validate import sharding
from snip_megatron.megatron.watched_modules import linears_watched
from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.errors import SnipError
from snip_megatron.reporting.blame import write_blame_page
from snip_megatron.runtime.agreement import on_rank_zero
from snip_megatron.runtime.blame import Place, blame_step
from snip_megatron.runtime.blame_passes import Job
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.exchange import MapChannel
from snip_megatron.runtime.host import Host
from snip_megatron.runtime.storage import write_atomically
from snip_megatron.sensitivity.blame import Blame, Checkpoint


def prepare_blame(config: SnipConfig, args: argparse.Namespace) -> None:
    """Let the job load the last checkpoint before the first step, and write nothing of its own.

    Raises SnipError if there is no such checkpoint, or if the job cannot be blamed.
    """
    steps = blamed_steps(config)
    if compat.batch_size_ramp(args) is not None:
        raise SnipError(f"--snip-blame cannot be combined with {compat.batch_size_ramp(args)}: microbatches before the"
                        " step would be counted wrongly")  # fmt: skip
    if (sharded := sharding(args)) is not None:
        raise SnipError(f"--snip-blame cannot be combined with {sharded}, which shards the weights of a linear;"
                        " load the checkpoint without it")  # fmt: skip
    args.snip_blame_folder = run_folder(config, args)
    args.save = args.tensorboard_dir = None
    args.wandb_project = ""
    if not args.load:
        if steps[0] > 1:
            raise SnipError(f"--snip-blame {steps[0]}: give --load, with a checkpoint from before iteration {steps[0]}")
        return
    if args.ckpt_step is None:
        saved = [
            int(match[1])
            for path in Path(args.load).glob("iter_*")
            if (match := re.fullmatch(r"iter_(\d{7})", path.name))
        ]
        before = [iteration for iteration in saved if iteration < steps[0]]
        if saved and not before:
            raise SnipError(
                f"--snip-blame {steps[0]}: no checkpoint before it in --load {args.load}, whose first is of iteration"
                f" {min(saved)}"
            )
        if before:
            args.ckpt_step = max(before)


def blamed_steps(config: SnipConfig) -> list[int]:
    """Return the iterations of ``--snip-blame`` in order. Raises SnipError."""
    words = (config.blame or "").split(",")
    if not all(word.isascii() and word.isdigit() and int(word) for word in words):
        raise SnipError(f"--snip-blame {config.blame}: must be iterations, counted from 1 and separated by commas")
    return sorted({int(word) for word in words})


def run_blame(
    config: SnipConfig,
    args: argparse.Namespace,
    host: Host,
    registry: LinearRegistry,
    call: StepCall,
    job: Job,
    step_of: Callable[[StepCall], MegatronStep],
) -> NoReturn:
    """Print and write the verdict about every step, and end the process. Collective.

    ``call`` is the first training step after loading, and ``step_of`` makes a host's step of it.
    """
    channel = MapChannel(registry.names, host.device)
    chosen = on_rank_zero(lambda: str(args.snip_blame_folder or tempfile.mkdtemp(prefix="snip-blame-")))
    folder = Path(channel.agree(chosen or ""))
    checkpoint = Checkpoint(str(args.load), call.step) if call.step else None
    remedies = RemedyWriter(config, args, registry.rows, getattr(args, "snip_host_recipe", None))
    for iteration in blamed_steps(config):
        skipped = iteration - 1 - call.step
        if skipped < 0 or (skipped and checkpoint is None):
            raise SnipError(
                f"--snip-blame {iteration}: the checkpoint in --load {args.load} is of iteration {call.step}, not from"
                " before it"
            )
        step = step_of(dataclasses.replace(call, step=iteration - 1))
        step.first = skipped * call.num_microbatches
        state = functools.partial(state_checked, call.model, call.optimizer, registry, host.groups)
        blame = blame_step(job, host, registry, step, Place(iteration, checkpoint, folder), state)
        on_rank_zero(lambda blame=blame: publish(remedies.write(blame, job.formats, folder), folder))  # type: ignore[misc]
    if dist.is_initialized():
        dist.barrier()
    raise SystemExit(0)


GUARD_SECONDS = 60.0
"""Seconds after which the guard tries no more suspects."""


def guard_blame(
    config: SnipConfig,
    args: argparse.Namespace,
    host: Host,
    registry: LinearRegistry,
    call: StepCall,
    step: MegatronStep,
    failed: PrecisionMap,
) -> Blame:
    """Return the verdict about the step before which the guard takes a map back, and write it. Collective.

    The weights are those that the alarm left, and the microbatches the next ones.
    """
    root = run_folder(config, args) or Path(tempfile.gettempdir())
    job = snip_job(failed, registry)
    state = functools.partial(state_checked, call.model, call.optimizer, registry, host.groups)
    blame = blame_step(
        job, host, registry, step, Place(call.step + 1, None, root), state,
        microbatches=config.probe_microbatches, seconds=GUARD_SECONDS,
    )  # fmt: skip
    remedies = RemedyWriter(config, args, registry.rows)
    on_rank_zero(lambda: publish(remedies.write(blame, failed, root), root))
    return blame


def publish(blame: Blame, folder: Path) -> None:
    """Write and print a verdict."""
    path = folder / f"blame_{blame.step}.json"
    write_atomically(path, blame.to_json().encode())
    write_blame_page(blame, path.with_suffix(".html"))
    say(blame.text())
    say(f"written to {path}")


def map_of_job(
    config: SnipConfig, registry: LinearRegistry, device: object, restored: PrecisionMap | None
) -> PrecisionMap:
    """Return the map under which the job trains: ``--snip-map``, or the checkpoint's. Collective. Raises SnipError."""
    path = config.map
    job_map = on_rank_zero(lambda: restored if path is None else load_map(path, registry.names))
    job_map = MapChannel(registry.names, device).agree(job_map)  # type: ignore[arg-type]
    if job_map is None:
        raise SnipError(
            "--snip-blame: the checkpoint holds no map of SNIP; give the map in force by --snip-map MAP.json"
        )
    return job_map


def snip_job(precision_map: PrecisionMap, registry: LinearRegistry) -> Job:
    """Return a job under SNIP."""
    description = describe(precision_map, registry.names)
    return Job("snip", description, precision_map, watch=functools.partial(linears_watched, registry))


def describe(precision_map: PrecisionMap, names: Sequence[str]) -> str:
    """Return the formats of a map in words."""
    return ", ".join(f"{count} GEMMs in {name}" for name, count in precision_map.counts(names).items())

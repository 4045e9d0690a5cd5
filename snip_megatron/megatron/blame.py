"""``--snip-blame STEP``: the verdict about steps of a Megatron job, in place of its training.

The job loads a checkpoint from before the step as in a resume, and reads its data in the same order. It trains and
saves nothing, and ends with exit code 0. A step is the iteration that Megatron prints, counted from 1.
"""

import argparse
import dataclasses
import functools
import hashlib
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import torch
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
from snip_megatron.runtime.exchange import MapChannel, is_true_on_any, objects_of_ranks
from snip_megatron.runtime.guard import Alarm
from snip_megatron.runtime.host import Host
from snip_megatron.runtime.storage import write_atomically
from snip_megatron.sensitivity.blame import UNFINISHED, Blame, Checkpoint, Weights


def prepare_blame(config: SnipConfig, args: argparse.Namespace) -> None:
    """Let the job load the last checkpoint before the first step, and write nothing of its own.

    Raises SnipError if there is no such checkpoint, or if the job cannot be blamed.
    """
    steps = blamed_steps(config)
    if getattr(args, "train_iters", None) is not None and steps[-1] > args.train_iters:
        raise SnipError(
            f"--snip-blame {steps[-1]}: the job ends at iteration {args.train_iters}; give --train-iters {steps[-1]} or"
            " more"
        )
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
    path = on_rank_zero(lambda: str(args.snip_blame_folder or tempfile.mkdtemp(prefix="snip-blame-")))
    folder = Path(channel.agree(path or ""))
    checkpoint = Checkpoint(str(args.load), call.step) if call.step else None
    remedies = RemedyWriter(config, args, registry.rows, getattr(args, "snip_host_recipe", None))
    weights = Weights(call.step, weights_digest(call.model))
    if checkpoint is not None:
        for line in on_rank_zero(lambda: list(moved_data(args))) or ():
            say(line)
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
        place = Place(iteration, checkpoint, folder, weights)
        blame = _of_broken_weights(call, job, place) or blame_step(job, host, registry, step, place, state)
        on_rank_zero(lambda blame=blame: publish(remedies.write(blame, job.formats, folder), folder))  # type: ignore[misc]
    if dist.is_initialized():
        dist.barrier()
    raise SystemExit(0)


_DATA_ARGUMENTS = ("data_path", "train_data_path", "split", "seed", "seq_length", "global_batch_size")
"""Megatron's arguments that decide which samples a step reads."""


def moved_data(args: argparse.Namespace) -> Iterator[str]:
    """Yield a line for each sign that the job reads other samples than the one that saved the checkpoint."""
    checkpoint = compat.checkpoint_arguments(args)
    if checkpoint is None:
        return
    saved, saved_at = checkpoint
    for name in _DATA_ARGUMENTS:
        saved_value, value = getattr(saved, name, None), getattr(args, name, None)
        if saved_value != value:
            yield (
                f"data that moved: --{name.replace('_', '-')} was {saved_value} when the checkpoint was saved, and is"
                f" {value}: the microbatches may be others"
            )
    for prefix in [*(args.data_path or ()), *(args.train_data_path or ())]:
        path = Path(f"{prefix}.bin")
        if path.is_file() and path.stat().st_mtime > saved_at:
            yield f"data that moved: {path} was written after the checkpoint: the microbatches may be others"


def guard_blame(
    config: SnipConfig,
    args: argparse.Namespace,
    host: Host,
    registry: LinearRegistry,
    call: StepCall,
    step_of: Callable[[StepCall], MegatronStep],
    alarm: Alarm,
    failed: PrecisionMap,
) -> Blame | None:
    """Return the verdict about the step of an alarm, before the guard takes its map back, and write it. Collective.

    The weights are those that training has now. If a rank has not kept the microbatches of the step, as after a resume,
    they are the next ones. Returns None if the data has no more.
    """
    count = guard_microbatches(config, host, call)
    candidates: list[Callable[[], StepCall]] = [
        lambda: dataclasses.replace(
            call, step=alarm.step, num_microbatches=count,
            data_iterator=compat.past_microbatches(call.data_iterator, alarm.step, count),
        ),
        lambda: _readable(call, count),
    ]  # fmt: skip
    readable = next((each for each in map(functools.partial(_on_all_ranks, host), candidates) if each), None)
    if readable is None:
        return None
    root = run_folder(config, args) or Path(tempfile.gettempdir())
    job = snip_job(failed, registry)
    state = functools.partial(state_checked, call.model, call.optimizer, registry, host.groups)
    weights = Weights(call.step, weights_digest(call.model))
    place = Place(readable.step + 1, None, root, weights)
    blame = _of_broken_weights(call, job, place) or blame_step(
        job, host, registry, step_of(readable), place, state, seconds=config.guard_blame_seconds, microbatches=count,
    )  # fmt: skip
    remedies = RemedyWriter(config, args, registry.rows)
    on_rank_zero(lambda: publish(remedies.write(blame, failed, root), root))
    return blame


def guard_microbatches(config: SnipConfig, host: Host, call: StepCall) -> int:
    """Return how many microbatches of a step the guard keeps on each rank."""
    return min(call.num_microbatches, -(-config.probe_microbatches // host.pass_group) * host.pass_group)


def _readable(call: StepCall, count: int) -> StepCall:
    compat.repeated(call.data_iterator, range(count))
    return call


def _on_all_ranks(host: Host, make: Callable[[], StepCall]) -> StepCall | None:
    """Return the result of ``make``. None if it raises SnipError on a rank. Collective."""
    try:
        call: StepCall | None = make()
    except SnipError:
        call = None
    return None if is_true_on_any(call is None, host.device) else call


def broken_weights(model: Sequence[torch.nn.Module]) -> str | None:
    """Return the name of a parameter of some rank that is not finite. None if all are. Collective."""
    compat.gather_parameters(model)
    named = [pair for chunk in model for pair in chunk.named_parameters()]
    sums = torch.stack([each.detach().sum(dtype=torch.float64) for _, each in named])
    broken = torch.nonzero(~torch.isfinite(sums)).flatten().tolist()
    names = objects_of_ranks(named[broken[0]][0] if broken else None)
    return next((name for name in names if name is not None), None)


def _of_broken_weights(call: StepCall, job: Job, place: Place) -> Blame | None:
    """Return that no verdict is possible on weights that are not finite. None if they are. Collective."""
    name = broken_weights(call.model)
    if name is None:
        return None
    reason = f"after step {call.step} the weights are not finite ({name}): load a checkpoint from before"
    return Blame(place.step, place.checkpoint, job.kind, job.description, UNFINISHED, reason, {}, weights=place.weights)


_CHUNK = 2**24  # elements of a parameter that are read at a time


def weights_digest(model: Sequence[torch.nn.Module]) -> str:
    """Return a digest of the bits of all parameters on all ranks. It is equal only on the same layout. Collective."""
    compat.gather_parameters(model)
    sums = []
    for chunk in model:
        for parameter in chunk.parameters():
            local = parameter.detach().reshape(-1)
            bits = local.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()])
            total = torch.zeros((), dtype=torch.int64, device=bits.device)
            for start in range(0, len(bits), _CHUNK):
                part = bits[start : start + _CHUNK].long()
                total = total * 31 + (part * torch.arange(1, 2 * len(part), 2, device=bits.device)).sum()
            sums.append(total)  # integers, which overflow alike
    local_digest = hashlib.sha256(str(torch.stack(sums).tolist()).encode()).hexdigest()
    return hashlib.sha256("".join(objects_of_ranks(local_digest)).encode()).hexdigest()[:16]


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

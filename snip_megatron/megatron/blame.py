"""``--snip-blame STEP``: the verdict about steps of a Megatron job, in place of its training.

The job loads a checkpoint from before the step as in a resume, and reads its data in the same order. It trains and
saves nothing, and ends with exit code 0. A step is the iteration that Megatron prints, counted from 1.
"""

import argparse
import dataclasses
import functools
import hashlib
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from snip_megatron.layers.context import LinearHandle
from snip_megatron.layers.registry import LinearRegistry, load_map
from snip_megatron.megatron import compat
from snip_megatron.megatron.compat.megatron_precision import delayed_state, shared_amax
from snip_megatron.megatron.host import MegatronStep, StepCall
from snip_megatron.megatron.remedy import RemedyWriter, bf16_ends
from snip_megatron.megatron.run_record import run_folder
from snip_megatron.megatron.startup import say
from snip_megatron.megatron.state_check import checksum, state_checked
from snip_megatron.megatron.validate import sharding
from snip_megatron.megatron.watched_modules import by_module, linears_watched, modules_watched
from snip_megatron.numerics.products.host_recipe import HostRecipe
from snip_megatron.precision import Gemm, LinearId, PrecisionMap, option_id
from snip_megatron.precision.errors import SnipError
from snip_megatron.reporting.blame import write_blame_page
from snip_megatron.runtime import gemm_check
from snip_megatron.runtime.agreement import on_rank_zero
from snip_megatron.runtime.blame import blame_step
from snip_megatron.runtime.blame_passes import Job, Passes
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.exact_products import RecipeNumerics
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
        saved = [int(path.name.removeprefix("iter_")) for path in Path(args.load).glob("iter_" + 7 * "[0-9]")]
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
        blame = job.unfinished(iteration, checkpoint, weights)
        _verdict(Passes(job, host, registry, step), call, blame, folder, remedies)
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
) -> dict[str, Any]:
    """Write the verdict about the step of an alarm, before the guard takes its map back. Collective.

    The weights are those that training has now. If a rank has not kept the microbatches of the step, as after a resume,
    they are the next ones. There is no verdict if the data has no more. Returns the fields of the event.
    """
    count = config.probed_microbatches(call.num_microbatches, host.pass_group)

    def next_microbatches() -> StepCall:
        compat.repeated(call.data_iterator, range(count))  # raises SnipError at the end of the data
        return call

    def past_microbatches() -> StepCall:
        microbatches = compat.past_microbatches(call.data_iterator, alarm.step, count)
        return dataclasses.replace(call, step=alarm.step, num_microbatches=count, data_iterator=microbatches)

    readable = _on_all_ranks(host, past_microbatches) or _on_all_ranks(host, next_microbatches)
    if readable is None:
        return {"verdict": UNFINISHED, "why": "no microbatches are left", "culprit": "", "seconds": 0.0}
    root = run_folder(config, args) or Path(tempfile.gettempdir())
    weights, job = Weights(call.step, weights_digest(call.model)), snip_job(failed, registry)
    passes = Passes(job, host, registry, step_of(readable), count, config.guard_blame_seconds)
    blame = job.unfinished(readable.step + 1, None, weights)
    blame = _verdict(passes, call, blame, root, RemedyWriter(config, args, registry.rows))
    culprit = next(iter(blame.culprits), None) or blame.bug
    named = "" if culprit is None else f"{culprit.linear}:{culprit.gemm}"
    fields = {"verdict": blame.verdict, "why": blame.reason, "culprit": named, "seconds": blame.seconds}
    return fields | {"of_step": blame.step - 1, "weights": weights.digest}


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


def _verdict(passes: Passes, call: StepCall, blame: Blame, folder: Path, remedies: RemedyWriter) -> Blame:
    """Return, write and print the verdict about the step of ``passes``. Collective.

    No verdict is possible on weights that are not finite.
    """
    if (name := broken_weights(call.model)) is None:
        state = functools.partial(state_checked, call.model, call.optimizer, passes.registry, passes.host.groups)
        blame = blame_step(passes, blame, folder, state)
    else:
        reason = f"after step {call.step} the weights are not finite ({name}): load a checkpoint from before"
        blame = dataclasses.replace(blame, reason=reason)
    on_rank_zero(lambda: publish(remedies.write(blame, passes.job.formats, folder), folder))
    return blame


def weights_digest(model: Sequence[torch.nn.Module]) -> str:
    """Return a digest of the bits of all parameters on all ranks. It is equal only on the same layout. Collective."""
    compat.gather_parameters(model)
    sums = [checksum(parameter) for chunk in model for parameter in chunk.parameters()]
    local_digest = hashlib.sha256(str(torch.stack(sums).tolist()).encode()).hexdigest()
    return hashlib.sha256("".join(objects_of_ranks(local_digest)).encode()).hexdigest()[:16]


def publish(blame: Blame, folder: Path) -> None:
    """Write and print a verdict."""
    path = folder / f"blame_{blame.step}.json"
    write_atomically(path, blame.to_json().encode())
    write_blame_page(blame, path.with_suffix(".html"))
    say(blame.text())
    say(f"written to {path}")


# -- jobs --------------------------------------------------------------------------------------------------------------
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
    counts = precision_map.counts(registry.names)
    description = ", ".join(f"{count} GEMMs in {name}" for name, count in counts.items())
    return Job("snip", description, precision_map, watch=functools.partial(linears_watched, registry))


BOUND = gemm_check.BOUND | {4: 8.0}
"""Bits → least signal to noise ratio in dB. Healthy linears of Transformer Engine on an H200 have at least 46 dB in
eight bits and in bf16 (reductions over up to 768 numbers; more of them lose more, as fprop accumulates in few bits). In
four bits gradients are rounded with other draws than the reference's, which has run on no card with such GEMMs.
"""

State = tuple[Tensor, Tensor]


def host_job(recipe: HostRecipe, args: argparse.Namespace, registry: LinearRegistry) -> Job:
    """Return the job. The scales of delayed scaling are those of the checkpoint, which has been loaded."""
    first, last = bf16_ends(args)

    def is_quantized(name: str) -> bool:
        linear = LinearId.parse(name)
        return linear.stack != "decoder" or first <= linear.layer < args.num_layers - last

    names = [name for name in registry.names if is_quantized(name)]
    formats = PrecisionMap(choices={option_id(name, gemm): recipe.format for name in names for gemm in Gemm})
    stay = len(registry.names) - len(names)
    description = f"{recipe}" + (f", {stay} linears in bf16" if stay else "")
    numerics = RecipeNumerics(recipe)
    if recipe.name == "delayed":
        saved = _Histories(recipe, registry)
        numerics = RecipeNumerics(recipe, None, saved.of, shared_amax(args), saved.restore)
    keeps_weights = not getattr(args, "disable_parameter_transpose_cache", False)
    watch = functools.partial(modules_watched, registry, recipe, keeps_weights=keeps_weights)
    return Job("megatron", description, formats, numerics, watch, BOUND)


class _Histories:
    """The histories of delayed scaling as they were when training would have begun."""

    def __init__(self, recipe: HostRecipe, registry: LinearRegistry) -> None:
        self._recipe, self._modules = recipe, by_module(registry)
        self._saved = {key: (history.clone(), scale.clone()) for _, key, (history, scale) in self._states()}

    def _states(self) -> Iterator[tuple[LinearHandle, tuple[int, int, str], State]]:
        """Yield what Transformer Engine has now, with the module's first linear and (module, expert, operand)."""
        for module, handles in self._modules:
            for expert, operand in itertools.product(range(len(handles)), ("x", "w", "g")):
                if (state := delayed_state(module, expert, operand)) is not None:
                    yield handles[0], (id(module), expert, operand), state

    def of(self, handle: LinearHandle, expert: int, operand: str) -> State:
        """Return the history and the scale with which the step begins: those of a new run if none were loaded."""
        saved = self._saved.get((id(handle.module), expert, operand))
        device = handle.weight.device
        return saved or (torch.zeros(self._recipe.history, device=device), torch.ones((), device=device))

    def restore(self) -> None:
        """Let Transformer Engine begin with them again."""
        for handle, (_, expert, operand), state in self._states():
            for target, source in zip(state, self.of(handle, expert, operand), strict=True):
                target.copy_(source)

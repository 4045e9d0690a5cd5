"""``snip trial``: trains a job for a few steps in bf16, in Megatron's own FP8 and under ``--snip``, and compares them.

The three runs are those of the training entry with the job's own arguments, without what reads or writes a checkpoint
or a logger. They follow one another on this node, and each gets the same steps, batches and learning rates.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import re
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from snip_megatron import __version__
from snip_megatron.precision.errors import SnipError, cut, installed_version
from snip_megatron.runtime.config import FASTEST
from snip_megatron.runtime.storage import deliver, dump_json
from snip_megatron.tools import torchrun
from snip_megatron.tools.argument_check import check_arguments
from snip_megatron.tools.launch import last_value

SCHEMA = "snip.trial/1"
LOGS = ("bf16.log", "fp8.log", "snip.log")
STEPS, LEAST_STEPS = 60, 18
"""The default number of steps, and the smallest with a third of steps under the map."""
MICROBATCHES = 4
"""Microbatches of a rank and pipeline stage to which a larger global batch is cut."""
SAME, SAME_AS_FP8 = 1.03, 1.01
"""Ratios of two medians up to which they count as equal: against bf16, and against Megatron's FP8."""

_WITHOUT = re.compile(
    r"--(no-)?(save|load|async-save|use-persistent-ckpt|non-persistent|replication|pretrained-checkpoint|ckpt-step"
    r"|use-checkpoint-args|wandb|tensorboard|profile|use-pytorch-profiler|exit-interval|exit-duration|exit-on-missing"
    r"|train-iters|train-samples|lr-decay-samples|lr-warmup-samples|rampup-batch-size|eval-|full-validation"
    r"|multiple-validation-sets|skip-train)"
)
"""Arguments of Megatron that a trial leaves out."""
_PRECISION = re.compile(
    r"--(fp8|fp4|te-precision|first-last-layers-bf16|num-layers-at-(start|end)|moe-router-padding-for"
    r"|reuse-grad-buf-for-mxfp8)"
)
"""Arguments of Megatron's own FP8 and FP4."""
_RECIPES = ("--fp8-format", "--fp4-format", "--te-precision-config-file")
_OF_THE_RUN = re.compile(r"--snip(-(dir|overwrite|first-update|update-interval|lag|wait|schedule|deploy|replay))?\Z")
"""Arguments of SNIP that belong to the length or the record of a run."""
_STEP = re.compile(r"iteration +(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: (\S+)")
_MEMORY = re.compile(r"max allocated: ([\d.]+)")


@dataclass
class Run:
    """One of the three runs."""

    name: str  # its row in the table
    arguments: list[str]  # those of the training entry
    skipped: str = ""  # why it is not run. Empty if it is
    error: str = ""  # the last error line of its log, if it failed
    # step_ms, losses: of every step
    step_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0  # from its start to its end
    memory_bytes: int | None = None  # the peak of allocated GPU memory over the ranks that print it

    @property
    def ms(self) -> float | None:
        """Median milliseconds of the last third of its steps."""
        return statistics.median(self.step_ms[-(len(self.step_ms) // 3) :]) if len(self.step_ms) >= 3 else None

    @property
    def loss(self) -> float | None:
        """Mean loss of the last third of its steps."""
        return statistics.fmean(self.losses[-(len(self.losses) // 3) :]) if len(self.losses) >= 3 else None

    def read(self, log: str) -> None:
        """Take the steps that a log has."""
        steps = _STEP.findall(log)
        self.step_ms, self.losses = [float(ms) for _, ms, _ in steps], [float(loss) for _, _, loss in steps]
        peaks = [float(peak) for peak in _MEMORY.findall(log)]
        self.memory_bytes = int(max(peaks) * 2**20) if peaks else None


@dataclass(frozen=True)
class Machine:
    """This node: the name of its GPUs and their compute capability, empty and None without a GPU."""

    gpus: int
    device: str = ""
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Trial:
    """The three runs, and what is equal in all of them."""

    runs: tuple[Run, Run, Run]  # bf16, Megatron's own FP8, ``--snip``
    machine: Machine
    ranks: int
    steps: int
    notes: tuple[str, ...]  # what differs from the job, a line each
    tokens: int | None  # tokens of a step
    job_steps: int | None  # number of steps of the whole job. None if it is not known


@dataclass(frozen=True)
class Map:
    """The map of the run under ``--snip``."""

    adopted: int | None = None  # the step from which on it is in force, counted from 1. None if no map was adopted
    formats: dict[str, float] = field(default_factory=dict)  # shares of FLOPs by format
    update_s: float | None = None  # seconds that the update cost
    line: str = ""  # SNIP's own reason if there is no map


# -- the runs ------------------------------------------------------------------------------------------------------
def split_arguments(words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the arguments of a job that a trial keeps, those of Megatron's own FP8 or FP4, and those of SNIP.

    An argument goes with its values. Raises SnipError if ``words`` do not begin with an argument.
    """
    if not words or not words[0].startswith("--"):
        raise SnipError(
            "give the Megatron arguments of the job after --, without torchrun and the script"
            + (f", not {cut(words[0])}" if words else "")
        )
    job, precision, snip = list[str](), list[str](), list[str]()
    target = job
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0]
            dropped = _WITHOUT.match(name) or _OF_THE_RUN.match(name)
            target = [] if dropped else snip if name.startswith("--snip") else job
            target = precision if _PRECISION.match(name) else target
        target.append(word)
    return job, precision, snip


def own_fp8(job: Sequence[str], precision: Sequence[str], machine: Machine) -> tuple[str, list[str], str]:
    """Return Megatron's own FP8 on this machine: its name, its arguments, and why it cannot run (empty if it can).

    It is the job's, or the fastest that Transformer Engine has for the card.
    """
    recipe = last_value(precision, "--fp4-recipe") or last_value(precision, "--fp8-recipe")
    if named := any(word.partition("=")[0] in _RECIPES for word in precision):
        arguments = list(precision)
    elif (machine.capability or (0, 0)) >= (10, 0):
        recipe, arguments = "mxfp8", ["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8", *precision]
    else:
        recipe, arguments = "tensorwise", ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise", *precision]
    name = f"Megatron's {'own' if named and recipe is None else recipe} FP8"
    if machine.capability is None:
        return name, arguments, "it needs a GPU"
    if machine.capability < (8, 9):
        return name, arguments, "this card multiplies no FP8"
    if importlib.util.find_spec("transformer_engine") is None:
        return name, arguments, "Transformer Engine is not installed"
    local = last_value(job, "--transformer-impl") == "local"
    return name, arguments, "it needs --transformer-impl transformer_engine" if local else ""


def make_trial(words: Sequence[str], steps: int, machine: Machine, ranks: int, folder: Path) -> Trial:
    """Return the trial of a job. Raises SnipError if Megatron or SNIP refuses the job's arguments."""
    job, precision, snip = split_arguments(words)
    job_steps, schedule = last_value(words, "--train-iters"), list[str]()
    samples, batch_size = last_value(words, "--lr-warmup-samples"), last_value(words, "--global-batch-size")
    if samples is not None and batch_size is not None:  # a trial leaves out a warm-up in samples
        schedule = ["--lr-warmup-iters", str(int(samples) // int(batch_size))]
    under_snip = [*job, *precision, "--snip", *snip]
    variables = torchrun.environment(ranks, cpu=not machine.gpus)
    steps_of_job = int(job_steps) if job_steps is not None else None
    training = check_arguments([*under_snip, *schedule, "--train-iters", job_steps or str(steps)], ranks, variables)
    notes = list[str]()
    shared, tokens = [*job, *schedule], None
    if not isinstance(training.layout, str):
        layout = training.layout
        batch = min(layout.global_batch_size, MICROBATCHES * layout.pp * layout.dp * layout.micro_batch_size)
        tokens = batch * layout.seq_length
        if batch < layout.global_batch_size:
            shared += ["--global-batch-size", str(batch)]
            notes.append(f"--global-batch-size {batch} instead of {layout.global_batch_size}")
            if steps_of_job is None and (samples := last_value(words, "--train-samples")) is not None:
                steps_of_job = int(samples) // layout.global_batch_size
    shared += ["--train-iters", str(steps), "--eval-iters", "0", "--eval-interval", "1000000", "--log-interval", "1"]
    if last_value(shared, "--lr-decay-iters") is None:
        shared += ["--lr-decay-iters", str(max(steps, steps_of_job or 0))]
    shared += ["--exit-signal-handler", "--data-cache-path", str(folder / "data")]
    if machine.gpus:
        shared += ["--log-memory-interval", str(steps)]
    if machine.gpus and last_value(snip, "--snip-budget") is None and last_value(snip, "--snip-config") is None:
        snip = [*snip, "--snip-budget", str(FASTEST)]
        notes.append("--snip takes the fastest map: the loss of the first steps says nothing of that of the job")
    lag = min(10, steps // 6)
    name, arguments, skipped = own_fp8(job, precision, machine)
    run = [*("--snip-dir", str(folder / "snip"), "--snip-overwrite"), *("--snip-lag", str(lag), "--snip-wait", "240")]
    runs = (
        Run("bf16", shared),
        Run(name, [*shared, *arguments], skipped),
        Run("--snip", [*shared, *precision, "--snip", *snip, *run]),
    )
    return Trial(runs, machine, ranks, steps, tuple(notes), tokens, steps_of_job)


def train(run: Run, trial: Trial, log: Path) -> str | None:
    """Train one run. Returns the name of the signal that ended the trial, if one did."""
    command = torchrun.torchrun_command(1, trial.ranks, None, "snip-trial", "127.0.0.1")
    variables = torchrun.environment(trial.ranks, cpu=not trial.machine.gpus)
    started = time.monotonic()
    with log.open("wb") as output:
        code, stopped = torchrun.supervise([*command, *run.arguments], variables, output=output)
    run.seconds = time.monotonic() - started
    text = log.read_text(encoding="utf-8", errors="replace")
    run.read(text)
    if code or (len(run.step_ms) < trial.steps and stopped is None):
        run.error = last_error(text) or f"exit code {code} after {len(run.step_ms)} steps"
    return stopped


def last_error(log: str) -> str:
    """Return the most informative line of a failed run's log: the entry's own, else the last exception or line."""
    lines = [re.sub(r"^\[?(rank|default)\d+\]?: ?", "", line.strip()) for line in log.splitlines() if line.strip()]
    exceptions = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line) and "ChildFailed" not in line]
    entry = [line for line in lines if line.startswith("pretrain_gpt: ")]
    return (entry or exceptions or lines or [""])[-1][:500]


def find_machine() -> Machine:
    """Look for GPUs. The CUDA context that this makes takes memory of the runs as long as the process lives."""
    import torch

    if not torch.cuda.is_available():
        return Machine(0)
    return Machine(torch.cuda.device_count(), torch.cuda.get_device_name(), torch.cuda.get_device_capability())


# -- the result ----------------------------------------------------------------------------------------------------
def read_map(folder: Path) -> Map:
    """Return the map that the run under ``--snip`` has in force at its end."""
    from snip_megatron.reporting.summary import headline, summarise
    from snip_megatron.runtime.run_data import load_run

    run = load_run(folder / "snip")
    summary = summarise(run)
    adopted = next((event for event in reversed(run.events) if event["event"] == "adopt"), None)
    if adopted is None:
        return Map(line=headline(summary))
    return Map(int(adopted["step"]) + 1, dict(adopted.get("formats") or {}), summary.update_s or None)


def verdict(trial: Trial, chosen: Map) -> str:
    """Return what the trial says about the job, in one or two sentences."""
    bf16, fp8, snip = trial.runs
    if chosen.adopted is None:
        return f"No verdict: no map was adopted within {trial.steps} steps. {chosen.line}"
    if not trial.machine.gpus:
        return (
            "Not judged: this machine has no GPU. Formats are emulated on it, and its times say nothing of a GPU; the"
            " job trains under --snip."
        )
    if chosen.adopted > trial.steps - trial.steps // 3:
        return f"No verdict: the map was adopted at step {chosen.adopted} of {trial.steps} only: use more --steps."
    if set(chosen.formats) <= {"bf16"}:
        return "Not worth it: SNIP measured this job's GEMMs, and none is faster in another format than in bf16."
    assert bf16.ms is not None
    assert snip.ms is not None
    gain = bf16.ms / snip.ms
    if gain < SAME:
        hint = "; if the GPU waits for its host, add --cuda-graph-impl transformer_engine --te-rng-tracker"
        if any(word.startswith("--cuda-graph-impl") for word in bf16.arguments):
            hint = ""
        return f"Not worth it: a step under --snip is not faster than in bf16 ({gain:.2f} x){hint}."
    steps = "" if trial.job_steps is None else f" of {trial.job_steps:,} steps"
    hours = f"of 100 GPU hours of this job{steps} in bf16, {100 / gain:.0f} remain"
    if fp8.ms is None:
        why = fp8.skipped or "it failed"
        return f"Worth it: --snip is {gain:.2f} x as fast as bf16; {hours}. {fp8.name} was not compared: {why}."
    over = fp8.ms / snip.ms
    hours += f" ({100 * fp8.ms / bf16.ms:.0f} in {fp8.name})"
    both = f"--snip is {gain:.2f} x as fast as bf16 and {over:.2f} x as fast as {fp8.name}"
    if over >= SAME_AS_FP8:
        return f"Worth it: {both}; {hours}."
    if over > 1 / SAME_AS_FP8:
        return f"No faster than Megatron's own: {both}; {hours}."
    return f"Not worth it: {both}, which is the faster one; {hours}."


def table(trial: Trial, chosen: Map) -> str:
    """Return the table of a trial, with its notes."""
    bf16, columns = trial.runs[0].ms, "{:26s}{:>12s}{:>12s}{:>8s}{:>10s}{:>11s}"
    lines = [f"{trial.steps} steps on {_device(trial)}; medians of the last {trial.steps // 3}", ""]
    lines.append(columns.format("", "step", "tokens/s", "x bf16", "loss", "memory"))
    for run in trial.runs:
        if run.ms is None or run.error:
            lines.append(f"{run.name:26s}  {f'not run: {run.skipped}' if run.skipped else f'failed: {run.error}'}")
            continue
        tokens = "" if trial.tokens is None else f"{1e3 * trial.tokens / run.ms:,.0f}"
        gain = "" if bf16 is None else f"{bf16 / run.ms:.2f}"
        loss = "" if run.loss is None else f"{run.loss:.4f}"
        memory = "" if not run.memory_bytes else f"{run.memory_bytes / 2**30:.1f} GiB"
        lines.append(columns.format(run.name, f"{run.ms:,.1f} ms", tokens, gain, loss, memory).rstrip())
    line = "Map: none."
    if chosen.adopted is not None:
        from snip_megatron.runtime.account import duration, share_text

        cost = "" if chosen.update_s is None else f"; its update cost {duration(chosen.update_s)}"
        line = f"Map: {share_text(chosen.formats)}, from step {chosen.adopted} on{cost}."
    return "\n".join([*lines, "", line, *(f"In this trial: {note}." for note in trial.notes)])


def _device(trial: Trial) -> str:
    return f"{trial.ranks} × {trial.machine.device or 'CPU'}"


def as_dict(trial: Trial, chosen: Map, sentence: str, command: Sequence[str]) -> dict[str, Any]:
    """Return the object of a ``snip.trial/1`` file."""
    bf16, fp8, snip = (run.ms for run in trial.runs)
    versions = {name: installed_version(name) for name in ("torch", "megatron-core", "transformer-engine", "triton")}
    runs = [
        asdict(run)
        | {"arguments": shlex.join(run.arguments), "ms": run.ms, "loss": run.loss}
        | {"speedup": None if bf16 is None or run.ms is None else bf16 / run.ms}
        for run in trial.runs
    ]
    return {
        "schema": SCHEMA,
        "command": list(command),
        "version": __version__,
        "commit": os.environ.get("SNIP_COMMIT") or "unknown",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": versions,
        "device": trial.machine.device or "cpu",
        "ranks": trial.ranks,
        "steps": trial.steps,
        "tokens_per_step": trial.tokens,
        "job_steps": trial.job_steps,
        "notes": list(trial.notes),
        "runs": runs,
        "map": asdict(chosen),
        "over_fp8": None if fp8 is None or snip is None else fp8 / snip,
        "verdict": sentence,
    }


# -- the command ---------------------------------------------------------------------------------------------------
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``snip trial``."""
    parser.usage = "snip trial [--steps N] [--gpus N] [--out FILE] [--dir DIR] -- MEGATRON ARGUMENTS OF THE JOB"
    add = parser.add_argument
    add("--steps", type=int, default=STEPS, metavar="N", help=f"steps of each run; default: {STEPS}")
    add("--gpus", type=int, metavar="N", help="GPUs of this node to train on; default: all, or one CPU rank")
    add("--out", type=Path, metavar="FILE", help="write the result as JSON too")
    add("--dir", type=Path, metavar="DIR", help="keep the logs, and SNIP's record and report, in this folder")
    add("job", nargs="*", metavar="ARGUMENT", help="the job's arguments for Megatron, after --")


def run(args: argparse.Namespace) -> int:
    """Run the trial. Returns 1 if a run failed. Raises SnipError if the job's arguments are refused."""
    if args.steps < LEAST_STEPS:
        raise SnipError(f"--steps {args.steps}: must be at least {LEAST_STEPS}: a third of them is under the map")
    split_arguments(args.job)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        machine = pool.submit(find_machine).result()
    ranks = args.gpus or machine.gpus or 1
    if machine.gpus and ranks > machine.gpus:
        raise SnipError(f"--gpus {ranks}: this node has {machine.gpus} GPUs")
    folder = args.dir or Path(tempfile.mkdtemp(prefix="snip-trial-"))
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if args.dir is None:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        _say("checking the job's arguments")
        trial = make_trial(args.job, args.steps, machine, ranks, folder)
        try:
            _train_all(trial, folder)
            chosen = read_map(folder)
            sentence = verdict(trial, chosen)
            print(table(trial, chosen), f"\n{sentence}", sep="\n", flush=True)
            if args.out is not None:
                result = as_dict(trial, chosen, sentence, ["snip", *sys.argv[1:]])
                deliver("--out", args.out, dump_json(result))
            if trial.runs[1].error:
                raise _failure(trial.runs[1], folder / LOGS[1])
        except BaseException:
            stack.pop_all()  # the logs stay
            raise
    return 0


def _train_all(trial: Trial, folder: Path) -> None:
    """Train the three runs. Raises SnipError if one fails. A failure of Megatron's own FP8 does not end the trial."""
    for each, log in zip(trial.runs, LOGS, strict=True):
        if each.skipped:
            _say(f"{each.name}: not run, {each.skipped}")
            continue
        _say(f"{each.name}: {trial.steps} steps on {_device(trial)}")
        if (signal := train(each, trial, folder / log)) is not None:
            raise SnipError(f"ended on {signal} during the run of {each.name}", exit_code=1)
        if each.error and each is not trial.runs[1]:
            raise _failure(each, folder / log)


def _failure(run: Run, log: Path) -> SnipError:
    return SnipError(f"the run of {run.name} failed: {run.error} (log: {log})", exit_code=1)


def _say(line: str) -> None:
    print(f"snip trial: {line}", file=sys.stderr, flush=True)

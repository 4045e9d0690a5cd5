"""``snip launch``: trains a known configuration with torchrun on this node, or as one node of several."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from snip_megatron.precision.errors import SnipError, is_number

if TYPE_CHECKING:
    from snip_megatron.tools.launch_check import Training
    from snip_megatron.tools.launch_job import Job

_TIMINGS = "h200"  # the card of the forecast


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``snip launch``. Those that Megatron has too have the same names."""
    add = parser.add_argument
    add("configuration", metavar="CONFIGURATION", help="1b, 3b, 7b, 70b (TP8 × PP4 × DP2) or 70b-pp8 (TP8 × PP8)")
    add("--data", metavar="DIR", help="folder that snip prepare-data wrote; or mock, for random tokens")
    add("--save", type=Path, metavar="DIR", help="folder for checkpoints; a run resumes from the newest one there")
    add("--no-resume", dest="resume", action="store_false", help="start anew even if --save holds a checkpoint")
    add("--model", metavar="NAME", help="another Llama: 1b, 3b, 7b, 8b, 70b or 405b")
    for name, text in (("tp", "tensor parallel size"), ("pp", "pipeline parallel size")):
        add(f"--{name}", type=int, metavar="N", help=f"{text}; default: the configuration's")
    add("--nodes", type=int, metavar="N", help="nodes of the job; default: as many as the configuration's GPUs need")
    add("--gpus-per-node", type=int, metavar="N", help="ranks on each node; default: 8")
    for name, text in (("seq-length", "tokens of a sequence"), ("micro-batch-size", "sequences of a microbatch")):
        add(f"--{name}", type=int, metavar="N", help=f"{text}; default: the configuration's")
    add("--global-batch-size", type=int, metavar="N", help="sequences of a step; default: the configuration's")
    add("--recompute", choices=("none", "selective", "full"), help="activations to recompute in the backward")
    add("--no-snip", dest="snip", action="store_false", help="train with plain Megatron, for comparison")
    add("--smoke", action="store_true", help="train a tiny model for 20 steps with the same arguments, as a test")
    add("--cpu", action="store_true", help="run the ranks on the CPU over gloo, to try --smoke without a GPU")
    add("--rendezvous", metavar="HOST:PORT", help="for several nodes: one of them, with a free port; the same on all")
    add("--rendezvous-id", default="snip", metavar="ID", help="this job's name, the same on all nodes; default: snip")
    text = "address of this node, if its host name does not resolve; route: that from which it reaches the rendezvous"
    add("--local-address", metavar="ADDR|route", help=text)
    text = "let Megatron and SNIP check all arguments, and print the forecast of snip plan for H200s; start nothing"
    add("--check", action="store_true", help=text)
    add("--dry-run", action="store_true", help="print the exact command; start nothing")
    add("--hardware", action="store_true", help="print NODES GPUS_PER_NODE and exit; for scripts of schedulers")
    add("--progress", action="store_true", help="print SAVED STEPS (newest checkpoint, end of training) and exit")
    add(
        "--megatron",
        dest="extra",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="...",
        help="all arguments that follow are passed to Megatron, and override the configuration",
    )


def run(args: argparse.Namespace) -> int:
    """Train. Returns torchrun's exit code. Raises SnipError on bad input before anything is started."""
    from snip_megatron.tools import launch_agent as agent
    from snip_megatron.tools.launch_check import check
    from snip_megatron.tools.launch_job import Configuration, holds_checkpoint, make_job, megatron_arguments, progress

    fields = {f.name for f in dataclasses.fields(Configuration)} | set(inspect.signature(make_job).parameters)
    job = make_job(**{name: value for name, value in vars(args).items() if name in fields})
    if args.hardware:
        print(job.nodes, job.asked.gpus_per_node)
        return 0
    if args.progress:
        print(*progress(job))
        return 0
    added = agent.environment(job, cpu=args.cpu)
    if args.check:
        print("\n".join(_expected(job, check(megatron_arguments(job), job.layout.ranks, added))))
        return 0
    rendezvous = args.rendezvous or ("HEAD_NODE:29500" if args.dry_run and job.nodes > 1 else None)
    command = agent.torchrun(job, rendezvous, args.rendezvous_id, args.local_address) + megatron_arguments(job)
    if args.dry_run:
        _show(job, added, command)
        return 0
    if not args.cpu:
        agent.check_devices(job)
    elif not job.smoke:
        raise SnipError(
            f"--cpu trains only a tiny model: add --smoke, or leave out --cpu to train {job.model.name} on GPUs"
        )
    if job.load is not None and holds_checkpoint(job.load):
        print(f"snip launch: goes on from the checkpoint in {job.load}", flush=True)
    code, asked = agent.supervise(command, added, agent.failure_file(job.save))
    saved, steps = progress(job)
    if asked is not None and code == 0 and saved < steps:
        print(f"snip launch: ended on {asked}; the same command goes on from {job.save}", flush=True)
    return code


def _show(job: Job, added: Mapping[str, str], command: Sequence[str]) -> None:
    """Print a shell script: the model as a comment, then the command."""
    print(f"# {_title(job)}")
    variables = [f"{name}={shlex.quote(value)}" for name, value in added.items()]
    print(" \\\n    ".join([" ".join([*variables, shlex.quote(command[0])]), *_lines(command[1:])]))


def _title(job: Job) -> str:
    trial = ", shrunk for a trial of its arguments" if job.smoke else ""
    return f"{job.asked.title}: {job.model.name}{trial}"


def _expected(job: Job, training: Training) -> list[str]:
    """Return the forecast of a model as it was built; without one, why."""
    built = training.layout
    if isinstance(built, str):
        return [f"{built}: maps and budgets are checked when training starts"]
    from snip_megatron.planner.plan import make_plan
    from snip_megatron.planner.render import render
    from snip_megatron.planner.request import parse_request
    from snip_megatron.planner.step_time import StepModel
    from snip_megatron.runtime.config import given_arguments
    from snip_megatron.timing.loading import load_cost_model
    from snip_megatron.tools.launch_job import megatron_arguments

    vocabulary = built.model.vocabulary or job.model.vocabulary
    model = load_cost_model(_TIMINGS)
    given = given_arguments(megatron_arguments(job)) if job.snip else {"update_interval": 0}
    try:
        request = parse_request(given, model, train_iters=training.train_iters, recipe=training.recipe)
        layout = dataclasses.replace(
            built, model=dataclasses.replace(built.model, name=job.model.name, vocabulary=vocabulary)
        )
        return [_title(job), render(make_plan(StepModel(layout, model), request)).rstrip()]
    except SnipError as error:
        return [_title(job), f"no forecast: {error}"]


def _lines(words: Sequence[str]) -> list[str]:
    """Return one line per argument, followed by its values."""
    lines: list[list[str]] = []
    for word in words:
        if not lines or (word.startswith("-") and not is_number(word)):
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return [" ".join(line) for line in lines]

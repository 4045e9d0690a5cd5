"""``snip launch``: train a known configuration with torchrun on this node, or as one node of several."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from snip_megatron.errors import SnipError

if TYPE_CHECKING:
    from snip_megatron.launch.job import Job, Wishes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``snip launch``; those of Megatron have Megatron's names."""
    add = parser.add_argument
    add("configuration", metavar="CONFIGURATION", help="1b, 3b, 7b, 70b (TP8 × PP4 × DP2) or 70b-pp8 (TP8 × PP8)")
    add("--data", metavar="DIR", help="folder of snip prepare-data, or mock: random tokens")
    add("--save", type=Path, metavar="DIR", help="checkpoints; the run goes on from the newest one there")
    add("--no-resume", action="store_true", help="start anew even where --save holds a checkpoint")
    add("--model", metavar="NAME|config.json", help="another Llama: 1b, 3b, 7b, 8b, 70b, 405b, or its config.json")
    for name, text in (("tp", "tensor parallel size"), ("pp", "pipeline stages"), ("nodes", "nodes of the job")):
        add(f"--{name}", type=int, metavar="N", help=f"{text}; default: the configuration's")
    add("--gpus-per-node", type=int, metavar="N", help="ranks on each node; default: 8")
    add("--seq-length", type=int, metavar="N", help="default: the configuration's")
    add("--micro-batch-size", type=int, metavar="N", help="default: the configuration's")
    add("--global-batch-size", type=int, metavar="N", help="default: the configuration's")
    add("--recompute", choices=("none", "selective", "full"), help="default: the configuration's")
    add("--no-snip", action="store_true", help="plain Megatron, for comparison")
    add("--smoke", action="store_true", help="the same arguments with a tiny model of 20 steps: does it start?")
    add("--cpu", action="store_true", help="ranks on the CPU with gloo, to try --smoke anywhere")
    add("--rendezvous", metavar="HOST:PORT", help="of several nodes: a free port of one of them, the same on all")
    add("--rendezvous-id", default="snip", metavar="ID", help="of this job, the same on all nodes; default: snip")
    add("--local-address", metavar="ADDR", help="of this node, where its host name does not resolve")
    add("--dry-run", action="store_true", help="print what is expected and the exact command; start nothing")
    add("--hardware", action="store_true", help="print NODES GPUS_PER_NODE and leave: for schedulers' scripts")
    add(
        "--megatron",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="...",
        help="all that follows goes to Megatron, last",
    )


def run(args: argparse.Namespace) -> int:
    """Train; returns torchrun's exit code. Raises SnipError on bad input, before anything is started."""
    from snip_megatron.launch import agent
    from snip_megatron.launch.arguments import megatron_arguments
    from snip_megatron.launch.job import make_job

    job = make_job(_wishes(args))
    if args.hardware:
        print(job.nodes, job.gpus_per_node)
        return 0
    rendezvous = args.rendezvous or ("HEAD_NODE:29500" if args.dry_run and job.nodes > 1 else None)
    command = agent.torchrun(job, rendezvous, args.rendezvous_id, args.local_address) + megatron_arguments(job)
    added = agent.environment(job, cpu=args.cpu)
    if args.dry_run:
        _show(job, added, command)
        return 0
    if not args.cpu:
        agent.check_devices(job)
    if job.load is not None:
        print(f"snip launch: goes on from the checkpoint in {job.load}", flush=True)
    code, asked = agent.supervise(command, added)
    if asked is not None and code == 0:
        print(f"snip launch: ended on {asked}; the same command goes on from {job.save}", flush=True)
    return code


def _wishes(args: argparse.Namespace) -> Wishes:
    from snip_megatron.launch.job import Wishes

    return Wishes(
        configuration=args.configuration,
        model=args.model,
        tp=args.tp,
        pp=args.pp,
        nodes=args.nodes,
        gpus_per_node=args.gpus_per_node,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size,
        recompute=args.recompute,
        data=args.data,
        save=args.save,
        resume=not args.no_resume,
        snip=not args.no_snip,
        smoke=args.smoke,
        extra=tuple(args.megatron),
    )


def _show(job: Job, added: Mapping[str, str], command: Sequence[str]) -> None:
    """A shell script: what is expected as comments, then the command."""
    print("\n".join(f"# {line}" for line in [f"{job.title}: {job.layout.model.name}", *_expected(job)]))
    variables = [f"{name}={shlex.quote(value)}" for name, value in added.items()]
    print(" \\\n    ".join([" ".join([*variables, shlex.quote(command[0])]), *_lines(command[1:])]))


def _expected(job: Job) -> list[str]:
    if job.smoke:
        return ["a trial of its arguments with a tiny model: nothing is expected of its speed"]
    from snip_megatron.launch.figures import summary

    try:
        return summary(job.layout).splitlines()
    except SnipError as error:
        return [f"no forecast: {error}"]


def _lines(words: Sequence[str]) -> list[str]:
    """One argument with its values a line."""
    lines: list[list[str]] = []
    for word in words:
        if not lines or (word.startswith("-") and not _is_number(word)):
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return [" ".join(line) for line in lines]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True

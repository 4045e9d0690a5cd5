"""Whether a probe of a few sequences of a microbatch chooses the map that a probe of all of them chooses.

    snip prepare-data --output data/probed --vocab-size 1024
    python -m benchmarks.quality.probe_sequences --data data/probed --out F.json [--model 26m] [--steps 600]

Trains the model on that text. At each update the passes run
again and again on the same checkpoint: on 1, 2, 4, … and all sequences of one microbatch, and on all sequences of the
next microbatch. The last one shows how far two probes of as many sequences differ by their data alone. For each of them
the result names, compared with all sequences of the first microbatch:

- *spearman*: the rank correlation of the scores of all options;
- *agreement*: the share of GEMMs, weighted by FLOPs, that get the same format;
- *regret*: the rise of the map's loss under the other's scores, as a share of the spread between the best map and fp4
  everywhere.

On a machine without a GPU ``--model nano --steps 40`` shows the output.
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.quality.models import MODELS, model
from snip_megatron.megatron import startup
from snip_megatron.pretrain_gpt import parse_snip_arguments

OTHER = "all of the next microbatch"


def megatron_arguments(options: argparse.Namespace, microbatches: int = 2) -> list[str]:
    """Return the command line of the training, of so many microbatches a step."""
    every, batch = options.steps // options.updates, microbatches * options.sequences
    schedule = shlex.split(f"""
        --train-iters {options.steps} --micro-batch-size {options.sequences} --global-batch-size {batch}
        --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters {options.steps // 10} --weight-decay 0.1
        --adam-beta2 0.95 --clip-grad 1.0 --seed 1234 --num-workers 0 --eval-iters 0 --eval-interval 1000000
        --log-interval {every} --snip --snip-budget fp4={options.budget} --snip-formats fp8,fp4
        --snip-first-update {every - 1} --snip-update-interval {every} --snip-lag 1 --snip-wait 600
    """)
    data = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "255"]
    if options.data is not None:
        data = ["--train-data-path", f"{options.data}/train", "--valid-data-path", f"{options.data}/valid"]
        data += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", f"{options.data}/tokenizer"]
    return [*model(options.model).arguments(options.length), *data, *schedule]


def prepared(arguments: list[str]) -> Any:
    """Prepare a training of one rank in this process, which ``megatron.entry.run`` begins."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    sys.argv = ["pretrain_gpt", *arguments]
    return startup.prepare(arguments, parse_snip_arguments(arguments).snip_no_compat)


def train(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train, and return for each update what the tables of its probes are, by their sequences."""
    begun = prepared(megatron_arguments(options))
    from snip_megatron.megatron import entry
    from snip_megatron.runtime.probe import ProbeRunner

    run, tables = ProbeRunner.run, []

    def several(runner: ProbeRunner, step: Any, clip: float, sequences: int, update: Any) -> Any:
        counts = [n for n in range(1, sequences + 1) if sequences % n == 0]
        probed = {str(n): run(runner, step, clip, n) for n in counts}
        with mock.patch.object(step, "run", _of_the_next_microbatch(step)):
            probed[OTHER] = run(runner, step, clip, sequences)
        tables.append({name: result.table for name, result in probed.items()})
        return probed[str(sequences)]

    with mock.patch.object(ProbeRunner, "run", several):
        entry.run(begun)
    return tables


def _of_the_next_microbatch(step: Any) -> Callable[[], None]:
    def run() -> None:
        step.schedule([1])

    return run


def compared(tables: dict[str, Any], budget: str) -> dict[str, dict[str, float]]:
    """Return the figures of each probe of one update against the one of all sequences, which is the last but one."""
    from benchmarks.quality.proxy import spearman
    from snip_megatron.runtime.config import SnipConfig
    from snip_megatron.runtime.solving import SolveJob, solve_job

    request = SnipConfig(enabled=True, budget=f"fp4={budget}", formats=("fp8", "fp4")).request()
    solved = {name: solve_job(SolveJob(table=table, request=request)) for name, table in tables.items()}
    whole = solved[list(tables)[-2]]
    assert whole.scores is not None
    flops = {row.name: float(row.n * row.k) for row in tables[OTHER].linears}
    options = list(whole.scores)
    weight = {option: flops[option.rpartition(":")[0]] for option in options}

    def loss(choices: Any) -> float:
        return sum(whole.scores[option][fmt.value]["q"] for option, fmt in choices.items() if fmt.value != "bf16")

    best, worst = loss(whole.precision_map.choices), sum(whole.scores[option]["fp4"]["q"] for option in options)
    figures = {}
    for name, result in solved.items():
        pairs = [(whole.scores[o]["fp4"]["q"], result.scores[o]["fp4"]["q"]) for o in options]
        same = sum(weight[o] for o in options if result.precision_map.choices[o] == whole.precision_map.choices[o])
        figures[name] = {
            "spearman": spearman(*map(list, zip(*pairs, strict=True))) or 0.0,
            "agreement": same / sum(weight.values()),
            "regret": (loss(result.precision_map.choices) - best) / (worst - best),
        }
    return figures


def arguments_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the arguments of a training with updates."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of snip prepare-data; without it, Megatron's mock data")
    parser.add_argument("--model", default="26m", choices=list(MODELS))
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=8, help="sequences of a microbatch")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--updates", type=int, default=3, help="number of updates, spread evenly")
    parser.add_argument("--budget", default="0.75", help="FP4 share of the maps")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="the measured commit")
    return parser


def main() -> int:
    """Run the benchmark. Returns the exit code."""
    options = arguments_of(__doc__).parse_args()
    from benchmarks.common import header, write

    about = header(options.commit)
    updates = [compared(tables, options.budget) for tables in train(options)]
    mean = {
        name: {kind: statistics.fmean(update[name][kind] for update in updates) for kind in updates[0][name]}
        for name in updates[0]
    }
    print(f"{'sequences':>28} {'spearman':>9} {'agreement':>9} {'regret':>9}")
    for name, figures in mean.items():
        print(f"{name:>28} " + " ".join(f"{value:9.4f}" for value in figures.values()))
    write(
        options.out,
        {**about, "arguments": {k: str(v) for k, v in vars(options).items()}, "mean": mean, "updates": updates},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

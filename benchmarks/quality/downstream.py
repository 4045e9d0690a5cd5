"""Downstream accuracy of the models of a comparison, by lm-evaluation-harness's own code.

    python -m benchmarks.quality.downstream results/1b.json --data DATA --work WORK --out results/quality/F.json

The experiment needs ``"save": true``, and ``--data`` and ``--work`` are those of its ``compare``. Each run's final
weights become a Hugging Face Llama and are evaluated in bf16 on two tasks that are made from the hold-out of ``--data``
(see ``downstream_tasks.py``). ``OUT.md`` gets the table. ``paired`` is the difference to the
bf16 run of the same seed on the same questions, with its standard error.

Needs lm_eval (made with 0.4.13) and transformers, but no network access.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import header, write
from benchmarks.quality.downstream_tasks import LINES, TEXT, held_out_texts, make_items, write_tasks
from benchmarks.quality.hf_llama import write_llama
from benchmarks.quality.models import load_data
from benchmarks.quality.models import model as llama
from benchmarks.quality.results import Results, load_results
from benchmarks.quality.runs import CHECKPOINT
from snip_megatron.precision.errors import SnipError

LM_EVAL = "0.4.13"
METRICS = {"acc": LINES, "acc_norm": LINES, "bits_per_byte": TEXT, "word_perplexity": TEXT}


@dataclass(frozen=True)
class Model:
    """A finished run: its entry in the result file, its checkpoint, and the folders of model and tasks."""

    run: Mapping[str, Any]
    experiment: Mapping[str, Any]
    checkpoint: Path
    tokenizer: Path
    exported: Path
    tasks: Path
    batch: int


def models(results: Results, data: Path, work: Path, batch: int) -> list[Model]:
    """Return the finished runs whose weights were kept. Raises SnipError if there are none."""
    models = []
    for run in results.runs.values():
        checkpoint = work / "runs" / run["id"] / CHECKPOINT
        if run["status"] == "done" and checkpoint.is_dir():
            folders = (checkpoint, data / "tokenizer", work / "downstream" / run["id"], work / "downstream" / "tasks")
            models.append(Model(run, results.experiment, *folders, batch))
    if not models:
        raise SnipError(
            f'{work}: holds no weights of a run of {results.path}; give the --work of its compare, and "save":'
            " true in its experiment"
        )
    return models


# -- one model, in a process of its own ------------------------------------------------------------------------
_device = "cpu"


def _take_device(devices: Any) -> None:
    global _device
    _device = devices.get()


def evaluate(model: Model) -> dict[str, Any]:
    """Convert and evaluate a model on the device of this process.

    Returns:
        The metrics with their standard errors, the numbers of questions and texts, and under ``right`` a 1 for each
        question that was answered right and a 0 for each other.
    """
    shutil.rmtree(model.exported, ignore_errors=True)
    sequence = model.experiment["training"]["sequence"]
    write_llama(model.checkpoint, llama(model.experiment["model"]), sequence, model.tokenizer, model.exported)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    loaded = HFLM(pretrained=str(model.exported), dtype="bfloat16", device=_device, batch_size=model.batch)
    manager = TaskManager(include_path=str(model.tasks), include_defaults=False)
    evaluation: Any = simple_evaluate(loaded, tasks=[LINES, TEXT], task_manager=manager, bootstrap_iters=1000)
    figures = {}
    for name, task in METRICS.items():
        metrics = evaluation["results"][task]
        figures[name], figures[f"{name}_stderr"] = metrics[f"{name},none"], metrics[f"{name}_stderr,none"]
    samples = sorted(evaluation["samples"][LINES], key=lambda sample: sample["doc_id"])
    right = {name: "".join(str(int(sample[name])) for sample in samples) for name in ("acc", "acc_norm")}
    return figures | {"questions": len(samples), "texts": len(evaluation["samples"][TEXT]), "right": right}


# -- the table -------------------------------------------------------------------------------------------------
def add_paired(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each row its differences to the bf16 run of the same kind and seed, question by question.

    That run has no label of its own, as the reference of ``compare``.
    """
    bf16 = {(row["kind"], row["seed"]): row["right"] for row in rows if row["policy"] == row["label"] == "bf16"}
    for row in rows:
        base = bf16.get((row["kind"], row["seed"]))
        if base is None or row["label"] == "bf16":
            continue
        row["paired"] = {}
        for name, right in row["right"].items():
            differences = [int(answer) - int(other) for answer, other in zip(right, base[name], strict=True)]
            stderr = statistics.stdev(differences) / len(differences) ** 0.5
            row["paired"][name] = {"mean": statistics.fmean(differences), "stderr": stderr}


def table(result: Mapping[str, Any]) -> str:
    """Return the Markdown page of a result."""
    facts = f"{result['model']}, {result['trained_tokens']:,} tokens; {result['device']}, {result['date']}"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    first = result["rows"][0]
    lines = [
        f"# Downstream: {result['experiment']}",
        "",
        f"{facts}, commit {result['commit'][:12]}. {versions}. Questions drawn with seed {result['seed']}.",
        "",
        f"    {result['command']}",
        "",
        f"`acc`: {first['questions']} questions, which of four blocks of lines of a held-out file comes next (chance:"
        f" 25 %); `acc_norm` by likelihood per byte. Bits per byte: the beginnings of {first['texts']} held-out files."
        " All models are evaluated in bf16. ± is one standard error over questions. The last column is the difference"
        " to bf16 on the same questions.",
        "",
        "| policy | seed | fp4 share | validation, own formats | in bf16 | acc % | acc_norm % | bits per byte"
        " | acc − bf16's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_line(row) for row in result["rows"])]) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    accuracy = [f"{100 * row[name]:.1f} ± {100 * row[f'{name}_stderr']:.1f}" for name in ("acc", "acc_norm")]
    paired = row.get("paired", {}).get("acc")
    cells = [
        row["label"],
        str(row["seed"]),
        f"{100 * row['average_share']:.1f} %",
        *(f"{row['validation'][name]:.4f}" for name in ("map", "bf16")),
        *accuracy,
        f"{row['bits_per_byte']:.4f}",
        "" if paired is None else f"{100 * paired['mean']:+.1f} ± {100 * paired['stderr']:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


# -- the command -----------------------------------------------------------------------------------------------
def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Downstream accuracy of the models of a comparison")
    parser.add_argument("results", type=Path, help="result file of compare")
    parser.add_argument("--data", type=Path, required=True, help="folder of snip prepare-data")
    parser.add_argument("--work", type=Path, required=True, help="--work of compare")
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--characters", type=int, default=8000, help="characters at the beginning of each text")
    parser.add_argument("--seed", type=int, default=1, help="seed of the questions")
    parser.add_argument("--batch", type=int, default=32, help="sequences of a forward pass")
    parser.add_argument("--per-gpu", type=int, default=1, help="models at the same time on each GPU, or on the CPU")
    parser.add_argument("--commit", help="what is measured, where the tree has no .git")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code."""
    arguments = parse(argv)
    if util.find_spec("lm_eval") is None:
        sys.exit(f"downstream.py: lm_eval is missing; install it with: pip install 'lm_eval[hf]=={LM_EVAL}'")
    try:
        return _run(arguments)
    except (SnipError, ValueError) as error:
        sys.exit(f"downstream.py: {error}")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.characters < 1:
        raise SnipError(f"--characters {arguments.characters}: must be at least 1")
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ["HF_DATASETS_CACHE"] = str(arguments.work / "downstream" / "datasets")
    results = load_results(arguments.results)
    experiment = results.experiment
    waiting = models(results, arguments.data, arguments.work.resolve(), arguments.batch)
    load_data(arguments.data, experiment["tokenizer"])
    texts = held_out_texts(arguments.data)
    items = make_items(texts, arguments.questions, arguments.seed, experiment["training"]["sequence"])
    if len(items) < 2:  # the standard error of a difference needs two
        raise SnipError(f"{len(items)} questions are too few: give more text or --questions, or a longer sequence")
    write_tasks(waiting[0].tasks, texts, items, arguments.characters)
    head = header(arguments.commit)
    head["versions"] |= {name: metadata.version(name) for name in ("lm_eval", "transformers", "datasets")}
    rows: list[dict[str, Any]] = []
    columns = ("kind", "label", "policy", "budget", "seed", "validation", "average_share", "id")
    for model, figures in zip(waiting, _evaluate_all(waiting, arguments.per_gpu), strict=True):
        rows.append({name: model.run[name] for name in columns} | figures)
        print(
            f"{model.run['label']}: acc {figures['acc']:.3f}, bits per byte {figures['bits_per_byte']:.4f}", flush=True
        )
    add_paired(rows)
    result = head | {"experiment": experiment["name"], "model": experiment["model"], "seed": arguments.seed}
    result |= {"trained_tokens": _tokens(experiment), "data": results.data, "rows": rows}
    write(arguments.out, result)
    arguments.out.with_suffix(".md").write_text(table(result), encoding="utf-8")
    print(table(result))
    return 0


def _evaluate_all(waiting: Sequence[Model], per_gpu: int) -> list[dict[str, Any]]:
    """Evaluate the models, several at a time, each process with a device of its own."""
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    spawn = multiprocessing.get_context("spawn")
    devices = spawn.SimpleQueue()
    for device in (gpus or ["cpu"]) * per_gpu:
        devices.put(device)
    with spawn.Pool(min(len(waiting), len(gpus or [""]) * per_gpu), _take_device, (devices,)) as pool:
        return pool.map(evaluate, waiting, chunksize=1)


def _tokens(experiment: Mapping[str, Any]) -> int:
    """Return the tokens that a run of the first phase has seen, those of the warm run included."""
    phase = experiment["phases"][0]
    warm = experiment["warm"]["steps"] if phase["kind"] == "from_warm" else 0
    training = experiment["training"]
    return int((warm + phase["steps"]) * training["global_batch"] * training["sequence"])


if __name__ == "__main__":
    sys.exit(main())

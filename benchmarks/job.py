"""Speed of whole trainings: SNIP's maps, Megatron's own FP8 and bf16, with and without CUDA graphs.

    python -m benchmarks.job --model 1b --out results/jobs/F.json [--commit SHA]

Every contender is a real training through the entry with the distributed optimizer, on mock data or, with ``--data``,
on the tokens of a text. Contenders other than SNIP's run without ``--snip``, so they are Megatron's own. The time of a
contender is the median of the step times that Megatron prints, over the second half of the steps. Trainings start side
by side up to the point at which they would use the GPU, and then train one after the other. With ``--rounds 2`` all of
them train a second time in the reverse order, and the medians are over both rounds. ``*_graphs`` is the fastest of the
implementations of CUDA graphs that are tried.

``snip_default*`` (``--snip`` alone) and ``snip_fp4_75*`` run two real updates. ``updates`` in the result has the time
by which their steps took longer, and the times in the run's events; ``maps`` has the formats that they chose with the
predicted loss and speedups. SNIP's other contenders keep one map, with the same format in every GEMM. ``predicted`` has
the milliseconds of a step under the last map: those of the run's own steps in bf16, less what the times of its GEMMs
say that the map saves.

``qwen3-moe`` and ``deepseek-moe`` have experts. Their trainings run grouped GEMMs, Megatron's fusions of router,
permutation and loss, no checks for NaN (``--nan-checks`` keeps them), Transformer Engine's formats with the padding
that they need (by the experts, or by the router in ``*_routed``), CUDA graphs without the experts. ``--graphs experts``
are Transformer Engine's of whole layers.

``fused`` in the result has what a training of SNIP says of its fusions.

A training that fails is listed in ``failed`` with its last error line, one that this machine cannot run in ``skipped``.
With ``--kernels``, torch's profiler records the step before the last on rank 0, and ``kernels`` in the result has its
milliseconds by kind of kernel, and those in which none ran; ``host`` has the share of that step in which a kernel ran,
and how often the host waited and launched. That step is slower, which a median does not notice.

Where Apex is not installed, Megatron's own layers write weight gradients in bf16 and add them to ``main_grad`` in a
kernel of their own, which SNIP's linears do not. With ``--fused-accumulation`` all contenders add them in the GEMM.

``--gpus 2 -- --expert-model-parallel-size 2`` shares the experts of a model over two GPUs; other layouts likewise.

If ``--out`` is the result of an earlier call on the same machine and code, the new figures are added to it. A table can
so be made in parts: the contenders named by ``--contenders``, or all that have no time yet, until ``--deadline``.
Arguments after ``--`` are passed to every training.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT, header, step_times, write
from benchmarks.jobs import kernels as job_kernels
from benchmarks.jobs.contenders import CONTENDERS, EXTRA, MODELS, NO_CHECKS, ROUTER_PADS
from benchmarks.jobs.multi_gpu import has_transformer_engine
from benchmarks.jobs.multi_gpu_runs import LLAMA
from benchmarks.jobs.turns import Outcome, Training
from benchmarks.jobs.updates import accounts, adopted_maps, predicted_step
from snip_megatron.runtime.run_data import read_events

LAG = 2
EXPERTS = "experts"
"""Transformer Engine's graphs of whole layers, with their experts. Its other graphs of a mixture leave experts out."""
GRAPHS = ("local", "transformer_engine", "full_iteration", EXPERTS)
_FUSED = re.compile(r"snip: fused with quantisation: (.*)")
STAND_INS = ROOT / "benchmarks/jobs/stand_ins"


@dataclass(frozen=True)
class Turn:
    """One training: a contender with one implementation of CUDA graphs, or without."""

    contender: str
    graphs: str | None

    @property
    def name(self) -> str:
        return self.contender if self.graphs is None else f"{self.contender}:{self.graphs}"


def model_arguments(arguments: argparse.Namespace) -> list[str]:
    """Return Megatron's arguments of the model that the command names."""
    omitted = NO_CHECKS if arguments.nan_checks else ()
    return [word for word in MODELS[arguments.model].arguments if word not in omitted]


class Job:
    """The trainings of one model.

    Args:
        arguments: the command's.
        folder: for maps, run directories and output.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments, self._folder = arguments, folder
        self._model = MODELS[arguments.model]

    # -- who takes part ----------------------------------------------------------------------------------------
    def impossible(self, name: str) -> str | None:
        """Return why this machine cannot run a contender, or None if it can."""
        contender = CONTENDERS[name]
        if contender.graphs and not torch.cuda.is_available():
            return "needs a GPU: CUDA graphs"
        if contender.transformer_engine and not torch.cuda.is_available():
            return "needs a GPU: Transformer Engine's FP8"
        if contender.transformer_engine and not has_transformer_engine():
            return "needs Transformer Engine"
        return None

    def turns(self, names: Sequence[str]) -> list[Turn]:
        """Return the trainings of the contenders, in their order."""
        turns = []
        for name in names:
            tried: Sequence[str | None] = CONTENDERS[name].graphs or (None,)
            if self._model.graphed and CONTENDERS[name].graphs:
                tried = ("transformer_engine",)
            if self._arguments.graphs and CONTENDERS[name].graphs:
                tried = self._arguments.graphs.split(",")
            turns += [Turn(name, graphs) for graphs in tried]
        return turns

    # -- arguments of a training -------------------------------------------------------------------------------
    def _arguments_of(self, turn: Turn, folder: Path) -> list[str]:
        contender, steps = CONTENDERS[turn.contender], self._arguments.steps
        arguments = [*LLAMA, *model_arguments(self._arguments), "--train-iters", str(steps), *contender.arguments]
        if self._arguments.data is not None:
            arguments.remove("--mock-data")
            arguments += ["--data-path", str(self._arguments.data), "--split", "99,1,0"]
        if "--multi-latent-attention" in arguments:
            arguments.remove("--group-query-attention")
        if turn.graphs is not None:
            arguments += ["--cuda-graph-impl", "transformer_engine" if turn.graphs == EXPERTS else turn.graphs]
            arguments += ["--te-rng-tracker"] if has_transformer_engine() else []
            arguments += ("--cuda-graph-modules", "attn", "moe") if turn.graphs == EXPERTS else self._model.graphed
        arguments += self._model.transformer_engine if has_transformer_engine() else ["--transformer-impl", "local"]
        if ROUTER_PADS in arguments and "--moe-router-fusion" in arguments:
            arguments.remove("--moe-router-fusion")
        if contender.map is not None:
            arguments += ["--snip", "--snip-policy", "bf16", "--snip-pin", f"*={contender.map.value}"]
            arguments += ["--snip-dir", str(folder / "run")]
        if contender.updates is not None:
            budget = shlex.split(contender.updates)
            arguments += ["--snip", *budget, *shlex.split(self._updates()), "--snip-dir", str(folder / "run")]
        return [*arguments, *self._arguments.megatron]

    def _updates(self) -> str:
        """Return the arguments of two updates.

        The first update follows steps in bf16 to compare with. The second has as many steps before it as after it.
        """
        steps = self._arguments.steps
        first = max(3, steps // 3)  # steps that compile or capture graphs must be fewer than the others before it
        every = max(LAG + 1, -(-(steps - first) // 2))
        return (
            f"--snip-first-update {first} --snip-update-interval {every} --snip-lag {LAG} --snip-wait 240"
            " --snip-guard-steps 0"
        )

    def _variables(self) -> dict[str, str]:
        """Return the environment variables of a training. The step before the last is recorded under ``--kernels``."""
        variables = {}
        if self._arguments.kernels:
            variables[job_kernels.STEP] = str(self._arguments.steps - 1)
        if self._arguments.fused_accumulation:
            variables["PYTHONPATH"] = str(STAND_INS)
        return variables

    # -- training ----------------------------------------------------------------------------------------------
    def train(self, turns: Sequence[Turn]) -> Iterator[tuple[Turn, Outcome, Path]]:
        """Yield the trainings as they end. As many start side by side as ``--beside`` says."""
        waiting = list(turns)
        while waiting:
            batch, waiting = waiting[: self._arguments.beside], waiting[self._arguments.beside :]
            with contextlib.ExitStack() as stack:
                started = []
                for turn in batch:
                    folder = Path(tempfile.mkdtemp(prefix=f"{turn.name.replace(':', '-')}-", dir=self._folder))
                    training = Training(
                        self._arguments.gpus, self._arguments_of(turn, folder), folder, self._variables()
                    )
                    started.append((turn, stack.enter_context(training), folder))
                for _, training, _ in started:
                    training.wait_ready()
                for turn, training, folder in started:
                    yield turn, training.take_turn(self._arguments.limit), folder


# -- the table -------------------------------------------------------------------------------------------------
def read_job(path: Path, argument: str) -> dict[str, Any]:
    """Return the result in a file that ``argument`` names. Exits if it is not a result of this benchmark."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.exit(f"{argument} {path}: cannot be read ({error})")
    if not isinstance(result, dict) or not {"ms", "speedup", "arguments"} <= result.keys():
        sys.exit(f"{argument} {path}: is no result of benchmarks.job")
    return result


class Table:
    """The result, which is written after every training."""

    def __init__(self, head: dict[str, Any], out: Path | None) -> None:
        self._out = out
        self.result: dict[str, Any] = head | {"ms": {}, "speedup": {}}
        self.result |= {key: {} for key in ("skipped", "failed", "graphs", "updates", "runs")}
        if out is not None and out.is_file():
            self._continue(read_job(out, "job.py: --out"))

    def _continue(self, earlier: dict[str, Any]) -> None:
        """Add to the result of an earlier command. Exits if it is of another machine, code or training."""
        current = self.result
        for name in ("device", "commit", "versions", "model", "gpus", "arguments", "fused_accumulation"):
            if earlier.get(name, False) != current[name]:
                table = f"{name} {earlier.get(name)}"
                sys.exit(f"job.py: --out: its table is of {table}, not {current[name]}: choose another")
        commands = [*str(earlier["command"]).split(" && "), current["command"]]
        self.result = current | earlier | {"command": " && ".join(dict.fromkeys(commands))}

    def skip(self, contender: str, reason: str) -> None:
        """Record a contender that cannot run here."""
        self.result["skipped"][contender] = reason
        self._write()

    def missing(self) -> list[str]:
        """Return the contenders of the table that no command has timed."""
        return [name for name in CONTENDERS if name not in EXTRA and name not in self.result["ms"]]

    def forget(self, contender: str) -> None:
        """Remove what earlier commands recorded about a contender."""
        for key in ("ms", "speedup", "graphs", "skipped"):
            self.result[key].pop(contender, None)
        for key in ("failed", "runs", "updates", "maps", "predicted", "kernels", "host", "fused"):
            for name in [name for name in self.result.get(key, ()) if name.partition(":")[0] == contender]:
                del self.result[key][name]

    def add(self, turn: Turn, outcome: Outcome, run: Path) -> None:
        """Record a training that has ended. The time of a contender is that of its fastest implementation of graphs."""
        ms = step_times(outcome.printed)
        if outcome.error is not None or len(ms) < 2:
            self.result["failed"][turn.name] = outcome.error or "printed no step times"
        else:
            runs = self.result["runs"].setdefault(turn.name, [])
            runs.append({"steps_ms": ms, "seconds": round(outcome.seconds, 2)})
            if CONTENDERS[turn.contender].updates is not None:
                self.result["updates"][turn.name] = accounts(read_events(run), ms)
                self.result.setdefault("maps", {})[turn.name] = adopted_maps(run)
            updates = self.result["updates"].get(turn.name)
            bf16_ms = updates[0]["usual_ms"]["before"] if updates else None
            predicted = predicted_step(run, bf16_ms) if run.is_dir() else None
            if predicted is not None:
                self.result.setdefault("predicted", {})[turn.name] = predicted
            fused = _FUSED.search(outcome.printed)
            if fused is not None:
                self.result.setdefault("fused", {})[turn.name] = fused[1]
            kernels = job_kernels.summary(run.parent)
            if kernels is not None:
                self.result.setdefault("host", {})[turn.name] = kernels.pop("host")
                self.result.setdefault("kernels", {})[turn.name] = kernels
            self._settle(turn.contender)
        self._write()

    def _settle(self, contender: str) -> None:
        medians = {name: self._median(name) for name in self.result["runs"] if name.partition(":")[0] == contender}
        best = min(medians, key=medians.__getitem__)
        self.result["ms"][contender] = medians[best]
        if ":" in best:
            self.result["graphs"][contender] = {name.partition(":")[2]: ms for name, ms in medians.items()}
        ms = self.result["ms"]
        order = [name for name in CONTENDERS if name in ms]
        self.result["ms"] = {name: ms[name] for name in order}
        self.result["speedup"] = {name: ms["bf16"] / ms[name] for name in order} if "bf16" in ms else {}

    def _median(self, turn: str) -> float:
        """Return the milliseconds of a step of a training, by the second half of each of its runs."""
        return statistics.median(
            ms for run in self.result["runs"][turn] for ms in run["steps_ms"][len(run["steps_ms"]) // 2 :]
        )

    def _write(self) -> None:
        write(self._out, self.result)

    def show(self) -> None:
        """Print the table."""
        for name, ms in self.result["ms"].items():
            speedup = self.result["speedup"].get(name)
            print(f"{name:24s} {ms:9.2f} ms" + ("" if speedup is None else f"  {speedup:6.3f} x bf16"))
        for name, ms in self.result.get("predicted", {}).items():
            measured = self._median(name)
            print(f"{name:24s} step predicted {ms:.1f} ms, measured {measured:.1f} ({ms / measured - 1:+.1%})")
        for key in ("skipped", "failed"):
            for name, reason in self.result[key].items():
                print(f"{name:24s} {key}: {reason}")
        for name, updates in self.result["updates"].items():
            for update in updates:
                waits = ", ".join(f"{kind} {seconds:.3f}" for kind, seconds in update["events"].items())
                print(
                    f"{name} update of step {update['update_step']}: steps took {update['longer_s']:.3f} s longer,"
                    f" {update['from_adoption_s']:.3f} of it from the adoption on; events {update['events_s']:.3f}"
                    f" ({waits})"
                )


# -- the command -----------------------------------------------------------------------------------------------
def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Step times of whole trainings, SNIP's beside Megatron's own")
    parser.add_argument("--model", choices=tuple(MODELS), required=True)
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--contenders", help=f"comma separated, of {', '.join(CONTENDERS)}")
    parser.add_argument("--graphs", help="implementations of CUDA graphs to try, comma separated, for all contenders")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=1, help="ranks, each with a GPU; their layout after --")
    parser.add_argument("--kernels", action="store_true", help="record the kernels of one step of each training")
    parser.add_argument(
        "--fused-accumulation",
        action="store_true",
        help="all trainings add weight gradients in the GEMM, as where Apex is installed",
    )
    parser.add_argument(
        "--nan-checks", action="store_true", help="mixtures too train with Megatron's checks for NaN, its default"
    )
    parser.add_argument("--beside", type=int, default=8, help="trainings that start side by side")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds a training may take")
    parser.add_argument("--deadline", type=float, help="seconds after which no training begins any more")
    parser.add_argument("--data", type=Path, help="prefix of tokens as snip prepare-data writes them (default: mock)")
    parser.add_argument("--work", type=Path, help="folder for the runs (default: a temporary one)")
    parser.add_argument("--commit", help="what is measured, where the tree has no .git")
    parser.add_argument("megatron", nargs="*", help="arguments for Megatron, after --")
    arguments = parser.parse_args(argv)
    for name in arguments.contenders.split(",") if arguments.contenders else ():
        if name not in CONTENDERS:
            parser.error(f"--contenders {name}: unknown; choose among {', '.join(CONTENDERS)}")
    if arguments.steps < 8:
        parser.error(f"--steps {arguments.steps}: must be at least 8, half of them count")
    for name in ("rounds", "gpus", "beside"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)}: must be at least 1")
    for name in arguments.graphs.split(",") if arguments.graphs is not None else ():
        if name not in GRAPHS:
            parser.error(f"--graphs {name}: unknown; choose among {', '.join(GRAPHS)}")
    return arguments


def main(argv: Sequence[str] | None = None, clock: Callable[[], float] = time.monotonic) -> int:
    """Run the command. Returns exit code 1 if a contender has neither a time nor a reason for being skipped."""
    arguments = parse(argv)
    began = clock()
    head = header(arguments.commit) | {
        "model": arguments.model,
        "gpus": arguments.gpus,
        "fused_accumulation": arguments.fused_accumulation,
        "arguments": [*model_arguments(arguments), *arguments.megatron],
    }
    table = Table(head, arguments.out)
    with contextlib.ExitStack() as stack:
        folder = arguments.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        job = Job(arguments, folder.resolve())
        possible = []
        for name in arguments.contenders.split(",") if arguments.contenders else table.missing():
            reason = job.impossible(name)
            if reason is None:
                possible.append(name)
            else:
                table.skip(name, reason)
        turns = job.turns(possible)
        order = [turn for number in range(arguments.rounds) for turn in turns[:: -1 if number % 2 else 1]]
        waiting = set(possible)
        for turn, outcome, run in job.train(order):
            if turn.contender in waiting:
                waiting.remove(turn.contender)
                table.forget(turn.contender)
            table.add(turn, outcome, run / "run")
            print(f"{turn.name}: {outcome.error or 'done'} after {outcome.seconds:.1f} s", flush=True)
            if arguments.deadline is not None and clock() - began > arguments.deadline:
                for name in set(possible).difference(table.result["ms"], table.result["failed"]):
                    table.skip(name, f"no time left after {arguments.deadline:.0f} s")
                break
    table.show()
    without = [name for name in possible if name not in table.result["ms"] and name not in table.result["skipped"]]
    if without:
        print(f"job.py: no time of {', '.join(without)}", file=sys.stderr)
    return 1 if without else 0


if __name__ == "__main__":
    sys.exit(main())

"""Verdicts of ``--snip-blame`` on planted faults and on healthy steps, beside rankings of operand errors.

    python -m benchmarks.quality.blame --out F.json [--model 26m|125m|1b] [--device cpu|cuda] [--cases N|NAME]

A short training on the sources of Python's standard library makes the checkpoint of a model. Every case then starts the
training entry with ``--snip-blame`` on it, in forked processes, after its fault was planted (:mod:`.blame_sites`).

Counts in the result are shares of the planted faults: ``verdict_right`` (a bug or rounding), ``first`` (the blamed
linear and GEMM, and for a bug on one rank the rank) and ``among_three``. ``healthy`` are steps without a fault of
precision, among them damaged text and weights that are too large or NaN; ``healthy_blamed`` of them were blamed.
``unseen`` has the same counts of those kinds alone on which no limit of ``--snip-blame`` was set.

Beside it stands where other rankings have the culprit, over faults of rounding, for which they are made:
``first_by_mse`` and ``first_by_underflow`` rank tensors by their error as Transformer Engine's inspector prints it,
``first_by_autoquantize`` linears by Σ (∂L/∂y · δy)² over the elements of y. Of these only the linear has to be right.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import header, write
from benchmarks.quality.blame_faults import BUG, HEALTHY, ROUNDING, Case, Catalogue, choices
from benchmarks.quality.blame_sites import LINEARS, install
from benchmarks.quality.models import _EXPERTS, MODELS, Model

MIXTURE = Model(
    4, 256, 512, 4, 2, f"--moe-ffn-hidden-size 256 --moe-router-topk 2 --moe-layer-freq [0]*1+[1]*3 {_EXPERTS} 8"
)
LAYOUTS: Mapping[str, tuple[int, Sequence[str]]] = {
    "one": (1, ()),
    "tp": (2, ("--tensor-model-parallel-size", "2")),
    "sp": (2, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "dp": (2, ()),
    "experts": (1, ()),
}


_PRELOADED = (
    "snip_megatron.pretrain_gpt",
    "snip_megatron.megatron.entry",
    "snip_megatron.megatron.setup",
    "megatron.core.datasets.helpers",
    "megatron.core.tokenizers.text.models",
    "megatron.core.tokenizers.text.text_tokenizer",
    "ortools.sat.python.cp_model",
)
"""Modules that a training imports on its way."""


_forking = threading.Lock()
_ports = itertools.count(10_000 + os.getpid() * 97 % 15_000)


@dataclass(frozen=True)
class Setting:
    """How a model is trained, and the microbatch of a blamed step.

    ``weights_only``: whether the checkpoint has no state of the optimizer, so that it loads in less time.
    """

    sequence: int
    batch: int
    micro: int
    steps: int
    lr: float = 1e-3
    weights_only: bool = False


SETTINGS = {
    "tiny": Setting(128, 8, 2, 60),
    "26m": Setting(128, 8, 2, 60),
    "125m": Setting(1024, 16, 4, 200),
    "1b": Setting(2048, 4, 1, 60, lr=3e-4, weights_only=True),
    "mixture": Setting(128, 8, 2, 60),
}


@dataclass
class Bench:
    """The checkpoints and the processes of the cases.

    Attributes:
        work: Folder of text, checkpoints and runs.
        data: Folder of the prepared text.
    """

    model: str
    device: str
    work: Path
    data: Path
    steps: int | None = None

    def prepare_text(self) -> None:
        if not (self.data / "train.idx").exists():
            command = ["--output", str(self.data), "--glob", "[a-c]*.py", "--tokenizer", "bytes", "--overwrite"]
            subprocess.run([sys.executable, "-m", "snip_megatron.tools.cli", "prepare-data", *command], check=True)

    def checkpoint(self, model: str) -> Path:
        """Return the folder of a model's checkpoint. The model is trained if there is none."""
        folder = self.work / f"{model}_checkpoint"
        if not (folder / "latest_checkpointed_iteration.txt").exists():
            setting, steps = SETTINGS[model], self._steps(model)
            arguments = [*self._arguments(model, setting.batch, setting.batch), "--save", str(folder)]
            arguments += ["--save-interval", "100000", "--exit-interval", str(steps)]
            arguments += ["--no-save-optim", "--no-save-rng"] if setting.weights_only else []
            print(f"training {model} for {steps} steps", flush=True)
            codes = self.run(arguments, 1, self.work / f"{model}_training.log", None)
            if not (folder / "latest_checkpointed_iteration.txt").exists():
                sys.exit(f"the training of {model} failed ({codes}): {self.work / f'{model}_training.log'}")
        return folder

    def _steps(self, model: str) -> int:
        return self.steps or SETTINGS[model].steps

    def _arguments(self, model: str, micro: int, batch: int) -> list[str]:
        setting = SETTINGS[model]
        shape = MIXTURE if model == "mixture" else MODELS[model]
        return [
            *shape.arguments(setting.sequence),
            *("--train-iters", str(self._steps(model) * setting.batch // batch + 50)),
            *("--lr", str(setting.lr), "--lr-warmup-iters", "10"),
            *("--micro-batch-size", str(micro), "--global-batch-size", str(batch), "--clip-grad", "1.0"),
            *("--train-data-path", f"{self.data}/train", "--valid-data-path", f"{self.data}/valid"),
            *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", f"{self.data}/tokenizer"),
            *("--num-workers", "0", "--eval-iters", "0", "--eval-interval", "100000", "--log-interval", "10"),
            *("--ckpt-format", "torch_dist", "--no-check-for-nan-in-loss-and-grad", "--override-opt-param-scheduler"),
        ]

    def blame(self, case: Case) -> dict[str, Any]:
        """Run a case in its own processes. Returns its line of the result."""
        model = "mixture" if case.layout == "experts" else self.model
        folder, setting = self.work / f"{self.model}_{self.device}_runs" / case.name, SETTINGS[model]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        ranks, layout = LAYOUTS[case.layout]
        replicas = ranks if case.layout == "dp" else 1
        step = self._steps(model) + 1 + case.step
        (folder / "map.json").write_text(json.dumps({"schema": "snip.map/1", "choices": choices(case, names(model))}))
        batch = setting.micro * case.microbatches * replicas
        arguments = [*self._arguments(model, setting.micro, batch), *layout, "--load", str(self.checkpoint(model))]
        arguments += ["--no-load-optim", "--no-load-rng"] if setting.weights_only else []
        arguments += ["--snip", "--snip-map", str(folder / "map.json"), "--snip-dir", str(folder / "run")]
        arguments += ["--snip-blame", str(step), "--snip-overwrite"]
        started = time.perf_counter()
        codes = self.run(arguments, ranks, folder / "log", case)
        result = {"name": case.name, "verdict": case.verdict, "seconds": round(time.perf_counter() - started, 1)}
        result |= {"unseen": True} if case.unseen else {}
        page = folder / "run" / f"blame_{step}.json"
        if any(codes) or not page.exists():
            return result | {"failed": _last_line(folder / "log"), "right": False}
        return result | judged(case, json.loads(page.read_text()), _rankings(folder))

    def run(self, arguments: Sequence[str], ranks: int, log: Path, case: Case | None) -> list[int]:
        """Run the training entry on forked ranks. Returns their exit codes."""
        context, port = multiprocessing.get_context("fork"), _free_port() if ranks > 1 else 0  # 0: any free port
        common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
        common |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "WANDB_MODE": "offline"}
        processes = []
        for rank in range(ranks):
            environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank if self.device == "cpu" else 0)}
            processes.append(context.Process(target=_be_rank, args=(list(arguments), environment, log, case)))
            with _forking:
                processes[-1].start()
        deadline = time.monotonic() + 240 + 600 * (case is None)
        while any(process.exitcode is None for process in processes):
            if any(process.exitcode for process in processes):
                deadline = min(deadline, time.monotonic() + 30)  # for the other ranks
            if time.monotonic() > deadline:
                for process in processes:
                    process.kill()
            time.sleep(0.05)
        return [int(process.exitcode or 0) for process in processes]


def names(model: str) -> list[str]:
    """Return the names of the linears of a model."""
    shape = MIXTURE if model == "mixture" else MODELS[model]
    linears = [f"decoder.layers.{layer}.{path}" for layer in range(shape.layers) for path in LINEARS]
    if model == "mixture":
        first = "decoder.layers.0."
        linears = [n if n.startswith(first) else n.replace(".mlp.linear", ".mlp.experts.linear") for n in linears]
    return linears


def _free_port() -> int:
    """Return a port that no other case has, below those that the system gives to connections."""
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))  # the store of a training listens on all addresses
            return port
    raise AssertionError


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or line.startswith("pretrain_gpt")]
    return (errors or lines or [""])[-1][:200]


def _be_rank(arguments: list[str], environment: Mapping[str, str], log: Path, case: Case | None) -> None:
    """Be a rank of a training, with the fault of ``case``. Ends the process."""
    code, rankings = 1, Rankings()
    try:
        with log.open("ab", buffering=0) as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.environ |= environment
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "" and case is not None:
            torch.set_num_threads(1)  # the cases share the cores
        sys.argv = ["pretrain_gpt", *arguments]
        from snip_megatron import pretrain_gpt

        if case is not None:
            install()
            rankings.install()
            if case.plant is not None and case.site is not None:
                case.plant(case.site)
        code = pretrain_gpt.main()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        if case is not None and environment["RANK"] == "0":
            (log.parent / "rankings.json").write_text(json.dumps(rankings.figures))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# -- other rankings ----------------------------------------------------------------------------------------------------
@dataclass
class Rankings:
    """Figures of every linear in the first backward in bf16: what others rank by.

    ``figures`` has for each linear the largest squared error of an operand, the largest share of an operand's numbers
    that vanish, and AutoQuantize's score.
    """

    figures: dict[str, dict[str, float]] = field(default_factory=dict)

    def install(self) -> None:
        """Record the inputs of linears when they run in bf16. Linears that gather their inputs are left out."""
        from snip_megatron.layers.autograd import QuantizedLinear
        from snip_megatron.precision import ALL_BF16

        run_forward, run_backward = QuantizedLinear.forward, QuantizedLinear.backward

        def forward(ctx: Any, x: Any, weight: Any, bias: Any, call: Any) -> Any:
            y = run_forward(ctx, x, weight, bias, call)
            gathers = call.sequence_parallel or call.reduce_scatter
            if call.formats == ALL_BF16 and call.has_backward and not gathers and _key(call) not in self.figures:
                ctx.compared = x.detach(), weight.detach(), y.detach()
            return y

        def backward(ctx: Any, *gradients: Any) -> Any:
            if hasattr(ctx, "compared"):
                self._record(ctx.call, *ctx.compared, gradients[0])
            return run_backward(ctx, *gradients)

        QuantizedLinear.forward = staticmethod(forward)  # type: ignore[method-assign]
        QuantizedLinear.backward = staticmethod(backward)  # type: ignore[method-assign]

    def _record(self, call: Any, x: Any, weight: Any, y: Any, g: Any) -> None:
        from snip_megatron.layers.autograd import gradient_keys
        from snip_megatron.numerics.products.backend import REFERENCE, matrix, numbers
        from snip_megatron.precision import Format

        handle, (fprop, dgrad, wgrad) = call.handle, call.handle.state.formats
        x, y, g = matrix(x), matrix(y), matrix(g).contiguous()
        specs = {
            "x": (x, handle.spec("x", x, fprop, wgrad)),
            "w": (weight, handle.spec("w", weight, fprop, dgrad)),
            "g": (g, handle.spec("g", g, dgrad, wgrad, gradient_keys(call, g, dgrad, wgrad))),
        }
        errors, vanished, fprops = [0.0], [0.0], []
        for name, (tensor, spec) in specs.items():
            for side, fmt in enumerate(spec.formats):
                operand = type(REFERENCE).quantize(REFERENCE, tensor, spec)[side]
                quantised = numbers(operand).float()
                if name != "g" and side == 0:
                    fprops.append(quantised)
                if fmt is Format.BF16 or quantised.shape != tensor.shape:
                    continue
                plain = tensor.float()
                errors.append(float((quantised - plain).square().mean()))
                vanished.append(float(((quantised == 0) & (plain != 0)).float().mean()))
        change = fprops[0] @ fprops[1].t() - y.float()
        self.figures[_key(call)] = {
            "mse": max(errors),
            "underflow": max(vanished),
            "autoquantize": float((g.float() * change).square().sum()),
        }


def _key(call: Any) -> str:
    return f"{call.handle.name}#{call.handle.expert}"


def _rankings(folder: Path) -> dict[str, list[str]]:
    """Return the three linears that each ranking has first."""
    file = folder / "rankings.json"
    figures = json.loads(file.read_text()) if file.exists() else {}
    kinds = ("mse", "underflow", "autoquantize")
    return {
        kind: [key.partition("#")[0] for key in sorted(figures, key=lambda key: -_number(figures[key][kind]))[:3]]
        for kind in kinds
    }


def _number(value: float) -> float:
    return float("inf") if value != value else value


# -- judging -----------------------------------------------------------------------------------------------------------
def judged(case: Case, blame: Mapping[str, Any], rankings: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return the verdict of a case, and whether it is right."""
    bug, culprits = blame.get("bug"), blame.get("culprits") or []
    blamed = [bug] if bug else culprits[:3]
    verdict = blame["verdict"]
    right = verdict not in (BUG, ROUNDING) if case.verdict == HEALTHY else verdict == case.verdict
    line: dict[str, Any] = {"found": verdict, "right": right, "blame_s": round(blame.get("seconds", 0.0), 2)}
    if blamed:
        line["blamed"] = [_described(each) for each in blamed]
    if case.verdict == HEALTHY:
        return line
    hits = [_hits(case, each) for each in blamed]
    line |= {
        "culprit": _described_site(case),
        "first": right and hits[:1] == [True],
        "among_three": right and any(hits),
    }
    if case.verdict == ROUNDING:
        line |= {f"first_by_{kind}": linears[:1] == [_linear(case)] for kind, linears in rankings.items()}
    return line


def _linear(case: Case) -> str:
    assert case.site is not None
    return case.site.linear


def _hits(case: Case, blamed: Mapping[str, Any]) -> bool:
    site = case.site
    assert site is not None
    name = blamed["linear"].removesuffix(".weight")
    return (
        name in (site.linear, *case.linears)
        and (not case.gemms or blamed.get("gemm") in (None, *case.gemms))
        and (case.verdict != BUG or site.rank is None or blamed.get("rank") == site.rank)
    )


def _described(blamed: Mapping[str, Any]) -> str:
    parts = [str(blamed["linear"]).removeprefix("decoder.layers."), blamed.get("gemm"), blamed.get("kind")]
    parts += [f"{what} {blamed[what]}" for what in ("expert", "rank") if blamed.get(what) is not None]
    return " ".join(part for part in parts if part)


def _described_site(case: Case) -> str:
    assert case.site is not None
    fields = {"linear": case.site.linear, "expert": case.site.expert, "rank": case.site.rank}
    return _described(fields | {"gemm": "|".join(case.gemms) if len(case.gemms) < 3 else None})


def summary(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the counts of the result."""
    faults = [line for line in lines if line["verdict"] != HEALTHY]
    rounding = [line for line in lines if line["verdict"] == ROUNDING]
    healthy = [line for line in lines if line["verdict"] == HEALTHY]

    def share(of: Sequence[Mapping[str, Any]], name: str) -> float | None:
        return round(sum(bool(line.get(name)) for line in of) / len(of), 4) if of else None

    seconds = [line["blame_s"] for line in lines if "blame_s" in line]
    return {
        "faults": len(faults),
        "verdict_right": share(faults, "right"),
        "first": share(faults, "first"),
        "among_three": share(faults, "among_three"),
        "healthy": len(healthy),
        "healthy_blamed": sum(line.get("found") in (BUG, ROUNDING) for line in healthy),
        "failed": sum("failed" in line for line in lines),
        "seconds": statistics.median(seconds) if seconds else None,
        "seconds_longest": max(seconds, default=None),
        **{f"first_by_{kind}": share(rounding, f"first_by_{kind}") for kind in ("mse", "underflow", "autoquantize")},
    }


# -- the command -------------------------------------------------------------------------------------------------------
def select(cases: Sequence[Case], which: str | None, seed: int) -> list[Case]:
    """Return the cases that ``--cases`` names: so many of each kind in turn, or those whose name has one of
    the texts in it, or whose verdict or layout it is.

    Without it, all, with kinds mixed, so that a time limit leaves out some of each.
    """
    if which is not None and not which.isdigit():
        words = which.split(",")
        return [case for case in cases if any(w in case.name or w in (case.verdict, case.layout) for w in words)]
    order = list(cases)
    random.Random(seed).shuffle(order)
    return order[: int(which)] if which else order


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--model", choices=sorted(set(SETTINGS) - {"mixture"}), default="26m")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    parser.add_argument("--cases", metavar="N|NAME,…", help="so many cases, or those with NAME in their name")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("runs/blame"), help="text, checkpoints and runs")
    parser.add_argument("--data", type=Path, help="prepared text instead of the standard library's")
    parser.add_argument("--steps", type=int, help="steps of the training before")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds after which no case starts")
    parser.add_argument("--list", action="store_true", help="print the cases, and run none")
    parser.add_argument("--commit")
    options = parser.parse_args(argv)
    started = time.monotonic()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a process that has initialised CUDA cannot fork ranks
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu":
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
        del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
    catalogue = Catalogue(MODELS[options.model].layers, options.seed)
    cases = select(catalogue.build(ranks=device == "cpu", experts=device == "cpu"), options.cases, options.seed)
    if options.list:
        print("\n".join(f"{case.verdict:14s} {case.name}" for case in cases))
        return 0
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    data = (options.data or work / "data").resolve()
    bench = Bench(options.model, device, work, data, options.steps)
    bench.prepare_text()
    for module in _PRELOADED:  # once, before processes are forked
        importlib.import_module(module)
    for model in {"mixture" if case.layout == "experts" else options.model for case in cases}:
        bench.checkpoint(model)
    with multiprocessing.get_context("fork").Pool(1) as pool:  # this process, which forks ranks, cannot use CUDA
        origin = pool.apply(_origin, (options.commit, device))
    result = origin = origin | {"model": options.model, "seed": options.seed}
    lines: list[dict[str, Any]] = []
    for line in run_all(bench, cases, options.jobs, started + options.time_limit):
        lines.append(line)
        print(json.dumps(line), flush=True)
        lines.sort(key=lambda line: (line["verdict"], line["name"]))
        result = origin | summary(lines) | {"unseen": summary([line for line in lines if "unseen" in line])}
        result |= {"left_out": len(cases) - len(lines), "cases": lines}
        write(options.out, result)
    print(json.dumps({name: value for name, value in result.items() if name != "cases"}, indent=1))
    return 0


def run_all(bench: Bench, cases: Sequence[Case], jobs: int, deadline: float) -> Iterator[dict[str, Any]]:
    """Run the cases, ``jobs`` at a time, until the deadline. Yields a line for each."""
    from concurrent.futures import ThreadPoolExecutor, as_completed

    def run(case: Case) -> dict[str, Any] | None:
        return None if time.monotonic() > deadline else bench.blame(case)

    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(run, case) for case in cases]):
            line = future.result()
            if line is not None:
                yield line


def _origin(commit: str | None, device: str) -> dict[str, Any]:
    return header(commit) | {"device": "cpu" if device == "cpu" else torch.cuda.get_device_name()}


if __name__ == "__main__":
    sys.exit(main())

"""SNIP on two or four GPUs of one host: equal to one GPU, what an update costs, step time over our entry without it.

    python -m benchmarks.multi_gpu --gpus 4 --out benchmarks/multi_gpu_<hardware>_<date>.json [--layouts tp2,pp2]

Two parts, each a row a layout (``--part`` for one of them); rows are written as they come, and a command that was cut
off goes on after those in its file. Real runs of the training entry under torchrun, bf16, distributed optimizer.

- *equivalence*: one GPU trains three steps and saves. Every layout loads that, probes, solves without stage constraint,
  adopts and trains on; table, map and losses are held against one GPU's. bf16 rounds partial sums, so they agree within
  its tolerance, not within fp32's (``tests/distributed/layout_matrix.py`` has that on a CPU).
- *time*: the entry without SNIP, with an all-bf16 map, and with an update whose 75 % map is then in force: medians of
  Megatron's step times; the update's passes and Σ wait from the run's events.

Context parallelism, which SNIP refuses until this has shown it, runs with Transformer Engine's attention; without it
the row says so. ``--device cpu`` runs tiny models over gloo: for a look at the output, not for figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT, header, write
from snip_megatron.precision import Gemm
from snip_megatron.reporting.readers import read_events, read_maps, read_metrics
from snip_megatron.statistics.table import RHO_GRID, StatisticsTable

Run = Callable[[int, Sequence[str], str, Path], subprocess.CompletedProcess[str]]
"""(ranks, arguments, module, folder) → the finished ranks."""

_COMMON = shlex.split("""
--group-query-attention --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --eval-interval 100000
--lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --seed 1234 --log-interval 1
--num-workers 0 --mock-data --tokenizer-type NullTokenizer --use-distributed-optimizer
--dist-ckpt-optim-fully-reshardable --ckpt-format torch_dist --bf16
""")


def _model(layers: int, hidden: int, ffn: int, heads: int, groups: int, seq: int, micro: int, batch: int) -> list[str]:
    return shlex.split(
        f"--num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {ffn} --num-attention-heads {heads}"
        f" --num-query-groups {groups} --seq-length {seq} --max-position-embeddings {seq} --micro-batch-size {micro}"
        f" --global-batch-size {batch}"
    )


@dataclass(frozen=True)
class Size:
    """Models of the two parts, and steps after the checkpoint or of a timed run."""

    equivalence: list[str]
    timed: list[str]
    vocab: int
    steps: int
    timed_steps: int


# Every shard, gated half, query group and token share is a multiple of 128, on all layouts: tiles fall alike.
SIZES = {
    "tiny": Size(_model(2, 256, 256, 4, 2, 128, 2, 8), _model(2, 256, 256, 4, 2, 128, 2, 8), 255, 4, 9),
    "gpu": Size(_model(8, 1024, 2816, 8, 4, 1024, 2, 8), _model(4, 4096, 14336, 32, 8, 4096, 1, 8), 32000, 20, 24),
}


@dataclass(frozen=True)
class Layout:
    """GPUs, Megatron's arguments, data parallel size (with context parallel peers: of microbatches)."""

    gpus: int
    arguments: str
    data: int = 1
    needs_te: bool = False


TP2, PP2 = "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "tp2": Layout(2, TP2),
    "pp2": Layout(2, PP2),
    "dp2": Layout(2, "", data=2),
    "cp2": Layout(2, "--context-parallel-size 2", needs_te=True),
    "tp2-pp2": Layout(4, f"{TP2} {PP2}"),
    "dp4": Layout(4, "", data=4),
}
AT, LAG = 3, 2
PROBED = 4
"""Microbatches of the probe over all data parallel ranks."""
UPDATE_AT = 4
"""Step of the timed run before which the update begins; its map is in force LAG steps later."""
_SNIP = shlex.split("--snip --snip-update-interval 100000 --snip-wait 240 --snip-budget fp4=0.75")

# bf16's rounding unit is 2^-8 = 3.9e-3: what a reduction over ranks in another order may move.
LIMITS = {"statistics_median": 4e-3, "map_agreement": 0.9, "loss": 2e-2}


def torchrun(ranks: int, arguments: Sequence[str], module: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Ranks on this host."""
    folder.mkdir(parents=True, exist_ok=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [*launcher, "-m", module, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


class Bench:
    """The runs in ``folder``.

    Args:
        run: starts ranks. size: the models. megatron: more arguments for every run.
    """

    def __init__(self, run: Run, folder: Path, size: Size, megatron: Sequence[str]) -> None:
        self._run, self._folder, self._size = run, folder, size
        self._megatron = [*_COMMON, "--vocab-size", str(size.vocab), *megatron]

    def _train(self, name: str, layout: Layout | None, steps: int, *arguments: str) -> str:
        """Standard output. Raises RuntimeError with the end of a failed run's error output."""
        extra = layout.arguments.split() if layout is not None else []
        done = self._run(
            layout.gpus if layout is not None else 1,
            [*self._megatron, "--train-iters", str(steps), *arguments, *extra],
            "benchmarks.multi_gpu_entry" if layout is not None and layout.needs_te else "snip_megatron.pretrain_gpt",
            self._folder / name,
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise RuntimeError(f"{name}: exit code {done.returncode}: " + " / ".join(lines[-12:])[-2000:])
        return done.stdout

    # -- equivalence -------------------------------------------------------------------------------------------
    def _probed(self, name: str, layout: Layout | None) -> Path:
        """The run directory of a run from the checkpoint; made once."""
        saved, run = self._folder / "saved", self._folder / f"equal-{name}" / "run"
        model, steps = self._size.equivalence, AT + self._size.steps
        if not (saved / "latest_checkpointed_iteration.txt").is_file():
            saving = ("--save", str(saved), "--save-interval", str(AT), "--exit-interval", str(AT))
            self._train("to-saved", None, steps, *model, *saving)
        if not (run / "report.html").is_file():
            data = layout.data if layout is not None else 1
            snip = [*_SNIP, "--snip-first-update", str(AT), "--snip-lag", str(LAG), "--snip-stage-tolerance", "none"]
            snip += ["--snip-probe-microbatches", str(max(1, PROBED // data)), "--snip-dir", str(run)]
            self._train(f"equal-{name}", layout, steps, *model, "--load", str(saved), *snip, "--snip-overwrite")
        return run

    def equivalence(self, name: str) -> dict[str, Any]:
        """Statistics, map and losses of a layout against one GPU's."""
        expected, actual = self._probed("1", None), self._probed(name, LAYOUTS[name])
        row = statistics_apart(*(StatisticsTable.load(r / "stats" / f"step_{AT}.npz") for r in (expected, actual)))
        row |= maps_apart(expected, actual) | losses_apart(expected, actual)
        within = (
            row["statistics_median"] <= LIMITS["statistics_median"]
            and row["map_agreement"] >= LIMITS["map_agreement"]
            and row["loss"] <= LIMITS["loss"]
            and row["same_tokens"]
        )
        return row | {"within_limits": bool(within)}

    # -- time --------------------------------------------------------------------------------------------------
    def time(self, name: str) -> dict[str, Any]:
        """Median milliseconds of a step without SNIP, under an all-bf16 map, under a 75 % map; the update's cost."""
        layout, steps, model = LAYOUTS[name], self._size.timed_steps, self._size.timed
        run = self._folder / f"time-{name}" / "run"
        update = [*_SNIP, "--snip-first-update", str(UPDATE_AT), "--snip-lag", str(LAG), "--snip-dir", str(run)]
        contenders = {
            "without": [],
            "all-bf16 map": ["--snip", "--snip-policy", "bf16"],
            "75 % map": [*update, "--snip-overwrite"],
        }
        warm = UPDATE_AT + LAG + 1  # steps that do not count: they compile, allocate, update
        each = {
            kind: [
                float(ms)
                for ms in _TIME.findall(
                    self._train(f"time-{name}-{kind.split()[0]}", layout, steps, *model, *snip)
                )  # Megatron prints on the last rank
            ]
            for kind, snip in contenders.items()
        }
        medians = {kind: statistics.median(ms[warm:]) for kind, ms in each.items()}
        over = {f"{kind} over without": medians[kind] / medians["without"] for kind in contenders if kind != "without"}
        return {"ms_a_step": medians, "steps_ms": each, **over, "update": update_cost(run, medians["75 % map"])}


_TIME = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+)")


def statistics_apart(expected: StatisticsTable, actual: StatisticsTable) -> dict[str, Any]:
    """Relative differences over all columns (drift from ρ = 1e-2 on): median, 95th percentile, worst and its column."""
    parts: dict[str, np.ndarray] = {}
    for name, array in expected.arrays().items():
        other = actual.arrays()[name]
        if name in ("drift2", "sink_drift2"):
            array, other = array[..., RHO_GRID >= 1e-2], other[..., RHO_GRID >= 1e-2]
        there = array != 0.0
        parts[name] = np.abs(other - array)[there] / np.abs(array[there])
    everything = np.concatenate([part.ravel() for part in parts.values()])
    worst = max((name for name in parts if parts[name].size), key=lambda name: float(parts[name].max()))
    return {
        "statistics_median": float(np.median(everything)),
        "statistics_p95": float(np.quantile(everything, 0.95)),
        "statistics_worst": float(parts[worst].max()),
        "worst_column": worst,
        "columns_median": {name: float(np.median(part)) for name, part in parts.items() if part.size},
        "same_tokens": (expected.tokens, expected.tokens_per_step) == (actual.tokens, actual.tokens_per_step),
    }


def maps_apart(expected: Path, actual: Path) -> dict[str, Any]:
    """Share of the GEMMs with the same format, and the fp4 share of each map."""
    (one,), (other,) = read_maps(expected).values(), read_maps(actual).values()
    names = [row.name for row in StatisticsTable.load(expected / "stats" / f"step_{AT}.npz").linears]
    same = [one.format_of(name, gemm) is other.format_of(name, gemm) for name in names for gemm in Gemm]
    return {
        "map_agreement": sum(same) / len(same),
        "achieved": [one.achieved, other.achieved],
        "adopted": [[e["step"] for e in read_events(run) if e["event"] == "adopt"] for run in (expected, actual)],
    }


def losses_apart(expected: Path, actual: Path) -> dict[str, Any]:
    """Worst relative difference of a step's loss, and after the last step."""
    one, other = ({m["step"]: m["loss"] for m in read_metrics(run)} for run in (expected, actual))
    apart = [abs(other[step] - loss) / loss for step, loss in one.items()]
    return {"loss": max(apart), "last_loss": apart[-1], "losses": [list(one.values()), list(other.values())]}


def update_cost(run: Path, step_ms: float) -> dict[str, Any]:
    """Passes and blocked time of the run's update, in milliseconds and in steps."""
    events = read_events(run)
    (submit,) = [e for e in events if e["event"] == "submit"]
    passes = {e["kind"]: 1e3 * e["seconds"] for e in events if e["event"] in ("probe", "collect")}
    blocked = sum(e.get("wait_s") or 0.0 for e in events if e["event"] in ("submit", "adopt", "solved", "postpone"))
    return {
        "ms": 1e3 * submit["update_seconds"],
        "steps": 1e3 * submit["update_seconds"] / step_ms,
        "passes_ms": passes,
        "wait_besides_probes_ms": 1e3 * blocked,
        "fp4_fraction": [e["fp4_fraction"] for e in events if e["event"] == "adopt"],
    }


# -- the command -----------------------------------------------------------------------------------------------
def wanted(layouts: str | None, gpus: int) -> list[str]:
    """Names of layouts that fit; those of ``layouts`` where given. Exits on one that is unknown or too large."""
    names = layouts.split(",") if layouts else [name for name, layout in LAYOUTS.items() if layout.gpus <= gpus]
    for name in names:
        if name not in LAYOUTS:
            sys.exit(f"multi_gpu.py: --layouts {name}: unknown; choose among {', '.join(LAYOUTS)}")
        if LAYOUTS[name].gpus > gpus:
            sys.exit(f"multi_gpu.py: --layouts {name} needs {LAYOUTS[name].gpus} GPUs, --gpus is {gpus}")
    return names


def has_transformer_engine() -> bool:
    """Whether its attention can be used."""
    import importlib.util

    return importlib.util.find_spec("transformer_engine") is not None


def measure(bench: Bench, result: dict[str, Any], names: Sequence[str], parts: Sequence[str], out: Path | None) -> None:
    """Fill ``result`` in; a row that cannot be made says why, and the others go on."""
    for part in parts:
        rows = result.setdefault(part, {})
        for name in names:
            if name in rows and "failed" not in rows[name]:
                continue
            if LAYOUTS[name].needs_te and not has_transformer_engine():
                rows[name] = {"skipped": "needs Transformer Engine's attention"}
            else:
                try:
                    rows[name] = getattr(bench, part)(name)
                except RuntimeError as error:
                    rows[name] = {"failed": str(error)}
            print(f"{part} {name}: {_short(rows[name])}", flush=True)
            write(out, result)


def _short(row: dict[str, Any]) -> str:
    kept = {k: v for k, v in row.items() if not isinstance(v, (dict, list)) or k == "ms_a_step"}
    return json.dumps(kept)


def main(argv: Sequence[str] | None = None, run: Run = torchrun) -> int:
    """The command; exit code 1 when a row failed."""
    parser = argparse.ArgumentParser(description="SNIP on the GPUs of one host")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=tuple(SIZES), help="default: gpu, on a CPU tiny")
    parser.add_argument("--layouts", help=f"comma separated, of {', '.join(LAYOUTS)}; default: all that fit")
    parser.add_argument("--part", choices=("equivalence", "time"), help="one of the two")
    parser.add_argument("--work", type=Path, help="folder for runs and the checkpoint (default: a temporary one)")
    parser.add_argument("--commit", help="what is measured, where the tree has no .git")
    parser.add_argument("megatron", nargs="*", help="arguments for Megatron, after --")
    arguments = parser.parse_args(argv)
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    names = wanted(arguments.layouts, arguments.gpus)
    size = SIZES[arguments.size or ("tiny" if arguments.device == "cpu" else "gpu")]
    result = header(arguments.commit) | {"gpus": arguments.gpus, "limits": LIMITS, "layouts": names}
    if arguments.out is not None and arguments.out.is_file():
        result = json.loads(arguments.out.read_text())
    with contextlib.ExitStack() as stack:
        folder = arguments.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = Bench(run, folder.resolve(), size, arguments.megatron)
        parts = [arguments.part] if arguments.part else ["equivalence", "time"]
        measure(bench, result, names, parts, arguments.out)
    failed = [f"{part} {name}" for part in parts for name in names if "failed" in result[part][name]]
    if failed:
        print(f"multi_gpu.py: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

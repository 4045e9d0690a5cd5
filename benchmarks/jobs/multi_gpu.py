"""SNIP on two or four GPUs of one host: results against one GPU, cost of an update, step time over the plain entry.

    python -m benchmarks.jobs.multi_gpu --gpus 4 --out results/jobs/F.json [--layouts tp2,pp2]

There are two parts, each with one row per layout (``--part`` selects one). Rows are written as they are made, and a
command that was stopped continues after the rows in its file. All runs are real runs of the training entry under
torchrun, in bf16 with the distributed optimizer.

- *equivalence*: one GPU trains three steps and saves. Every layout loads the checkpoint, probes, solves without stage
  constraint, adopts and continues. Table, map and losses are compared with those of one GPU. bf16 rounds partial sums,
  so they agree within its tolerance, not within that of fp32 (``tests/distributed/test_layout_matrix.py`` tests that
  on a CPU). Nothing is timed, so all these runs run side by side.
- *time*: the entry without SNIP, with an all-bf16 map, and with an update whose 75 % map is then adopted. The figures
  are medians of Megatron's step times, the update's passes, and Σ wait from the run's events. Layouts whose GPUs are
  free at the same time run side by side, which their rows say. With ``--alone`` they run one after the other. The runs
  of one layout always follow one another.

``--share N`` adds layouts of up to N ranks per GPU to *equivalence*. Each rank then acts as a separate host, over
sockets (:mod:`benchmarks.jobs.one_gpu_hosts`). This allows layouts of more ranks than GPUs.

Context parallelism needs Transformer Engine's attention; without it the row says so. ``--device cpu`` runs tiny models
over gloo, which shows the output but gives no meaningful figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import header, step_times, write
from benchmarks.jobs.multi_gpu_runs import LAYOUTS, SIZES, Layout, Run, Runs, rounds, torchrun, visible_gpus
from snip_megatron.precision import Gemm
from snip_megatron.runtime.run_data import read_events, read_maps, read_metrics
from snip_megatron.sensitivity.table import RHO_GRID, StatisticsTable

AT, LAG = 3, 2
PROBED = 4
"""Microbatches of the probe over all data parallel ranks."""
FIRST_UPDATE, EVERY = 4, 10
"""Of the timed run: the second update, before step 14, counts, since the first one compiles; its map is in force LAG
steps later."""
COUNTED_FROM = FIRST_UPDATE + EVERY + LAG + 1
_SNIP = shlex.split("--snip --snip-wait 240 --snip-budget fp4=0.75")


# bf16's rounding unit is 2^-8 = 3.9e-3: what a reduction over ranks in another order may move.
LIMITS = {"statistics_median": 4e-3, "map_agreement": 0.9, "loss": 2e-2}


def compared(expected: Path, actual: Path, at: int) -> dict[str, Any]:
    """Compare a layout's run with that of one GPU. ``at`` is the step of the update."""
    row = statistics_apart(*(StatisticsTable.load(r / "stats" / f"step_{at}.npz") for r in (expected, actual)))
    row |= maps_apart(expected, actual, at) | losses_apart(expected, actual)
    within = (
        row["statistics_median"] <= LIMITS["statistics_median"]
        and row["map_agreement"] >= LIMITS["map_agreement"]
        and row["loss"] <= LIMITS["loss"]
        and row["same_tokens"]
    )
    return row | {"within_limits": bool(within)}


def statistics_apart(expected: StatisticsTable, actual: StatisticsTable) -> dict[str, Any]:
    """Return relative differences over all columns (drift from ρ = 1e-2 on).

    These are the median, the 95th percentile, and the worst one with its column.
    """
    parts: dict[str, np.ndarray] = {}
    for name, array in expected.arrays.items():
        other = actual.arrays[name]
        if name in ("drift2", "sink_drift2"):
            array, other = array[..., RHO_GRID >= 1e-2], other[..., RHO_GRID >= 1e-2]
        nonzero = array != 0.0
        parts[name] = np.abs(other - array)[nonzero] / np.abs(array[nonzero])
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


def maps_apart(expected: Path, actual: Path, at: int) -> dict[str, Any]:
    """Return the share of the GEMMs with the same format, and the fp4 share of each map."""
    (reference,), (other,) = read_maps(expected).values(), read_maps(actual).values()
    names = [row.name for row in StatisticsTable.load(expected / "stats" / f"step_{at}.npz").linears]
    same = [reference.format_of(name, gemm) is other.format_of(name, gemm) for name in names for gemm in Gemm]
    return {
        "map_agreement": sum(same) / len(same),
        "achieved": [reference.achieved, other.achieved],
        "adopted": [[e["step"] for e in read_events(run) if e["event"] == "adopt"] for run in (expected, actual)],
    }


def losses_apart(expected: Path, actual: Path) -> dict[str, Any]:
    """Return the worst relative difference of a step's loss, and that after the last step."""
    reference, other = ({m["step"]: m["loss"] for m in read_metrics(run)} for run in (expected, actual))
    apart = [abs(other[step] - loss) / loss for step, loss in reference.items()]
    return {"loss": max(apart), "last_loss": apart[-1], "losses": [list(reference.values()), list(other.values())]}


def update_cost(run: Path, step_ms: float) -> dict[str, Any]:
    """Return the passes and the blocked time of the run's last update, in milliseconds and in steps."""
    events = read_events(run)
    submit = [e for e in events if e["event"] == "submit"][-1]
    events = [e for e in events if e["step"] >= submit["step"]]
    passes = {e["kind"]: 1e3 * e["seconds"] for e in events if e["event"] in ("probe", "collect")}
    blocked = sum(e.get("wait_s") or 0.0 for e in events if e["event"] in ("submit", "adopt", "solved", "postpone"))
    return {
        "ms": 1e3 * submit["update_seconds"],
        "steps": 1e3 * submit["update_seconds"] / step_ms,
        "passes_ms": passes,
        "wait_besides_probes_ms": 1e3 * blocked,
        "fp4_fraction": [e["fp4_fraction"] for e in events if e["event"] == "adopt"],
    }


class Bench:
    """The two parts. Both yield (layout, row) as rows are made. The row of a failed run has the reason.

    Args:
        gpus: names for CUDA_VISIBLE_DEVICES. None: no GPUs, and the layouts of part *time* run one after the other.
            Layouts of more ranks share the GPUs in part *equivalence*, and have no row in *time*.
        alone: whether layouts run one after the other on GPUs, too.
    """

    def __init__(self, runs: Runs, gpus: Sequence[str] | None, alone: bool = False) -> None:
        self._runs, self._size, self._gpus, self._alone = runs, runs.size, gpus, alone

    def _row(self, make: Callable[[], dict[str, Any]], runs: Sequence[str]) -> dict[str, Any]:
        """Return the row, or why there is none, with the seconds of those ``runs`` that this command made."""
        try:
            row = make()
        except Exception as error:  # a failed run, or one without what it should have written
            row = {"failed": f"{type(error).__name__}: {error}"}
        return row | {"run_seconds": {name: self._runs.seconds[name] for name in runs if name in self._runs.seconds}}

    def impossible(self, part: str, layout: Layout) -> str | None:
        """Return why a row is impossible, or None if it is possible."""
        if layout.needs_te and not has_transformer_engine():
            return "needs Transformer Engine's attention"
        if part == "time" and self._shared(layout):
            return f"needs {layout.gpus} GPUs"
        return None

    def _shared(self, layout: Layout | None) -> str | None:
        """Return the GPUs that the ranks of a layout share."""
        return ",".join(self._gpus) if self._gpus and layout and layout.gpus > len(self._gpus) else None

    # -- equivalence -------------------------------------------------------------------------------------------
    def equivalence(self, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Compare statistics, map and losses of layouts with those of one GPU.

        The checkpoint is made first. Then all runs run side by side, each on the first GPUs, because nothing is timed.
        """
        with ThreadPoolExecutor(len(names) + 2) as pool:
            saved = pool.submit(self._saved)
            reference = pool.submit(self._probed, "1", None, saved)
            probed = {name: pool.submit(self._probed, name, LAYOUTS[name], saved) for name in names}
            for name, run in probed.items():
                runs, shared = ("to-saved", "equal-1", f"equal-{name}"), self._shared(LAYOUTS[name])
                where = {"shared_gpus": shared} if shared else {}
                yield name, where | self._row(lambda run=run: compared(reference.result(), run.result(), AT), runs)

    def _saved(self) -> Path:
        """Return the checkpoint of one GPU, which is made once."""
        saved = self._runs.folder / "saved"
        if not (saved / "latest_checkpointed_iteration.txt").is_file():
            saving = ("--save", str(saved), "--save-interval", str(AT), "--exit-interval", str(AT))
            self._runs.train("to-saved", None, AT + self._size.steps, *self._size.equivalence, *saving)
        return saved

    def _probed(self, name: str, layout: Layout | None, saved: Future[Path]) -> Path:
        """Return the run directory of a run from the checkpoint, which is made once."""
        load, run = ("--load", str(saved.result())), self._runs.folder / f"equal-{name}" / "run"
        if not (run / "report.html").is_file():
            data = layout.data if layout is not None else 1
            snip = [*_SNIP, "--snip-first-update", str(AT), "--snip-lag", str(LAG), "--snip-stage-tolerance", "none"]
            snip += ["--snip-update-interval", "100000"]
            snip += ["--snip-probe-microbatches", str(max(1, PROBED // data)), "--snip-dir", str(run)]
            steps, model = AT + self._size.steps, self._size.equivalence
            snip += ["--snip-overwrite"]
            self._runs.train(f"equal-{name}", layout, steps, *model, *load, *snip, gpus=self._shared(layout))
        return run

    # -- time --------------------------------------------------------------------------------------------------
    def time(self, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Measure the cost of SNIP on each layout. Layouts that fit run side by side on separate GPUs."""
        if self._gpus is None:
            for name in names:
                yield name, self._timed(name, None)
            return
        for placed in rounds(names, self._gpus, self._alone):
            with ThreadPoolExecutor(len(placed)) as pool:
                names_of = {pool.submit(self._timed, name, ",".join(gpus)): name for name, gpus in placed.items()}
                for future in as_completed(names_of):
                    name = names_of[future]
                    where = {"gpus": ",".join(placed[name]), "beside": [other for other in placed if other != name]}
                    yield name, future.result() | where

    def _timed(self, name: str, gpus: str | None) -> dict[str, Any]:
        """Return the median milliseconds of a step without SNIP, under an all-bf16 and a 75 % map, and of an update."""
        layout, steps, model = LAYOUTS[name], self._size.timed_steps, self._size.timed
        run = self._runs.folder / f"time-{name}" / "run"
        update = [*_SNIP, "--snip-first-update", str(FIRST_UPDATE), "--snip-update-interval", str(EVERY)]
        update += ["--snip-lag", str(LAG), "--snip-dir", str(run)]
        contenders = {
            "without": [],
            "all-bf16 map": ["--snip", "--snip-policy", "bf16"],
            "75 % map": [*update, "--snip-overwrite"],
        }
        runs = {kind: f"time-{name}-{kind.split()[0]}" for kind in contenders}

        def make() -> dict[str, Any]:
            printed = {
                kind: self._runs.train(runs[kind], layout, steps, *model, *snip, gpus=gpus)
                for kind, snip in contenders.items()
            }
            each = {kind: step_times(text) for kind, text in printed.items()}
            medians = {kind: statistics.median(ms[COUNTED_FROM:]) for kind, ms in each.items()}
            over = {
                f"{kind} over without": ms / medians["without"] for kind, ms in medians.items() if kind != "without"
            }
            return {"ms_a_step": medians, "steps_ms": each, **over, "update": update_cost(run, medians["75 % map"])}

        return self._row(make, list(runs.values()))


# -- the command -----------------------------------------------------------------------------------------------
def chosen_layouts(layouts: str | None, ranks: int) -> list[str]:
    """Return the names of layouts that fit, or those of ``layouts``. Exits if one is unknown or too large."""
    names = layouts.split(",") if layouts else [name for name, layout in LAYOUTS.items() if layout.gpus <= ranks]
    for name in names:
        if name not in LAYOUTS:
            sys.exit(f"multi_gpu.py: --layouts {name}: unknown; choose among {', '.join(LAYOUTS)}")
        if LAYOUTS[name].gpus > ranks:
            sys.exit(f"multi_gpu.py: --layouts {name} needs {LAYOUTS[name].gpus} ranks, --gpus x --share is {ranks}")
    return names


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine's attention can be used."""
    import importlib.util

    return importlib.util.find_spec("transformer_engine") is not None


def measure(bench: Bench, result: dict[str, Any], names: Sequence[str], parts: Sequence[str], out: Path | None) -> None:
    """Add the rows to ``result``. A row that cannot be made has the reason, and the others continue."""
    for part in parts:
        rows = result.setdefault(part, {})

        def keep(name: str, row: dict[str, Any], part: str = part, rows: dict[str, Any] = rows) -> None:
            rows[name] = row
            print(f"{part} {name}: {_short(row)}", flush=True)
            write(out, result)

        missing = [name for name in names if name not in rows or {"failed", "skipped"} & rows[name].keys()]
        for name, reason in [(name, bench.impossible(part, LAYOUTS[name])) for name in missing]:
            if reason is not None:
                keep(name, {"skipped": reason})
                missing.remove(name)
        if missing:
            for name, row in getattr(bench, part)(missing):
                keep(name, row)


def _continued(result: dict[str, Any], current: dict[str, Any]) -> dict[str, Any]:
    """Return an earlier command's result, to which rows are added. Exits if it is of another machine or code."""
    for name in ("device", "commit", "versions", "gpus", "limits"):
        if result[name] != current[name]:
            sys.exit(
                f"multi_gpu.py: --out: its rows are of {name} {result[name]}, not {current[name]}: choose another file"
            )
    commands = [*result["command"].split(" && "), current["command"]]
    layouts = [*result["layouts"], *current["layouts"]]
    return result | {"command": " && ".join(dict.fromkeys(commands)), "layouts": list(dict.fromkeys(layouts))}


def _short(row: dict[str, Any]) -> str:
    fields = {k: v for k, v in row.items() if not isinstance(v, (dict, list)) or k == "ms_a_step"}
    return json.dumps(fields)


def main(argv: Sequence[str] | None = None, run: Run = torchrun) -> int:
    """Run the command. Returns exit code 1 if a row failed."""
    parser = argparse.ArgumentParser(description="SNIP on the GPUs of one host")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=tuple(SIZES), help="default: gpu, on a CPU tiny")
    parser.add_argument("--layouts", help=f"comma separated, of {', '.join(LAYOUTS)}; default: all that fit")
    parser.add_argument("--part", choices=("equivalence", "time"), help="one of the two")
    parser.add_argument("--alone", action="store_true", help="time one layout at a time, on an otherwise idle host")
    parser.add_argument(
        "--share", type=int, default=1, metavar="N", help="ranks a GPU, at most, where they are too few"
    )
    parser.add_argument("--work", type=Path, help="folder for runs and the checkpoint (default: a temporary one)")
    parser.add_argument("--commit", help="what is measured, where the tree has no .git")
    parser.add_argument("megatron", nargs="*", help="arguments for Megatron, after --")
    arguments = parser.parse_args(argv)
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    names = chosen_layouts(arguments.layouts, arguments.gpus * arguments.share)
    gpus = visible_gpus(arguments.gpus) if arguments.device == "cuda" else None
    size = SIZES[arguments.size or ("tiny" if arguments.device == "cpu" else "gpu")]
    result = header(arguments.commit) | {"gpus": arguments.gpus, "limits": LIMITS, "layouts": names}
    if arguments.out is not None and arguments.out.is_file():
        result = _continued(json.loads(arguments.out.read_text()), result)
    with contextlib.ExitStack() as stack:
        folder = arguments.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = Bench(Runs(run, folder.resolve(), size, arguments.megatron), gpus, arguments.alone)
        parts = [arguments.part] if arguments.part else ["equivalence", "time"]
        measure(bench, result, names, parts, arguments.out)
    failed = [f"{part} {name}" for part in parts for name in names if "failed" in result[part][name]]
    if failed:
        print(f"multi_gpu.py: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

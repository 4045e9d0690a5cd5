"""An update at the size of a cluster on one machine: rank 0's side, and a rank's side over torch's fake process group.

python -m benchmarks.reliability.scale --out F.json

Rank 0's side is the real one: the shares of all ranks merged into a table, ``RankZeroCoordinator`` with its solver
process and run directory, the message of the decision, the adoption. The rank's side runs the real reductions and the
real exchange, whose collectives return at once; their number and bytes must be those of ``snip plan``. Statistics and
losses are synthetic. Each case runs in a process of its own, and sizes are doubled to see what grows how. Seconds are
those of the processor, which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.common import ROOT, header, write
from snip_megatron.planner.layout import Layout
from snip_megatron.planner.models import Model, load_llama
from snip_megatron.planner.plan import parse_config, synthetic_losses
from snip_megatron.planner.step_time import StepModel
from snip_megatron.planner.updates import sinks_of, update_collectives
from snip_megatron.precision import Format, LinearRow, Role
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.sensitivity.probe_memory import OUTPUT_TOKENS
from snip_megatron.sensitivity.table import array_shapes
from snip_megatron.timing.cost_model import load_cost_model

RANKS, STAGES = 16_384, 16
MODELS = {"llama-405b": 126, "experts-256": 60}
"""Model → layers. The second one has 256 experts in every layer, of which a token takes 8."""
STEP, TOKENS = 100, 2.0**23
Body = dict[str, Any]


def layout_of(model: str, layers: int, ranks: int) -> Layout:
    """Return the layout of a training on so many ranks, whose stages have layers as even as they can be."""
    llama = replace(load_llama("405b"), blocks=layers)
    sizes: Body = {"tp": 8, "ep": 1, "sequence_parallel": True}
    rows, shape = llama.model(1).rows, llama.model(1)
    if model == "experts-256":
        sizes = {"tp": 1, "ep": 64, "grouped_experts": True}
        rows = tuple(row for layer in range(layers) for row in _experts_layer(layer))
        shape = Model("experts-256", rows, 7168, 128, 128, 128, 129_280, 4096)
    staged = tuple(replace(row, stage=row.id.layer * STAGES // layers) for row in rows)
    dp = ranks // (sizes["tp"] * STAGES)
    return Layout(
        replace(shape, rows=staged), pp=STAGES, vpp=1, dp=dp, seq_length=shape.context, micro_batch_size=1,
        global_batch_size=32 * dp, **sizes,
    )  # fmt: skip


def _experts_layer(layer: int) -> Iterator[LinearRow]:
    name = f"decoder.layers.{layer}."
    yield LinearRow(name + "self_attention.linear_qkv", 0, 3 * 16_384, 7168)
    yield LinearRow(name + "self_attention.linear_proj", 0, 7168, 16_384)
    yield LinearRow(name + "mlp.experts.linear_fc1", 0, 4096, 7168, experts=256, active=8)
    yield LinearRow(name + "mlp.experts.linear_fc2", 0, 7168, 2048, experts=256, active=8)


def _config(estimator: str) -> SnipConfig:
    return parse_config({"estimator": estimator}, load_cost_model("h200"))


# -- rank 0 --------------------------------------------------------------------------------------------------------
def rank_zero(model: str, layers: int, ranks: int) -> Body:
    """Run one update as rank 0. Returns processor seconds, bytes and memory of its parts.

    With another number of ranks than usual it only merges their shares, because the rest knows nothing of ranks.
    """
    from snip_megatron.runtime.coordinator import RankZeroCoordinator
    from snip_megatron.runtime.run_directory import RunDirectory
    from snip_megatron.sensitivity.reduction import PartialTable

    layout, config = layout_of(model, layers, ranks), _config("fisher")
    rows, sinks = layout.model.rows, tuple(sinks_of(layout.model))
    base_rss, seconds, drawn = _rss(), {}, np.random.default_rng(0)
    shares = _shares(layout, config, ranks)
    total = PartialTable(rows, config.measured_formats, sinks)
    merging = 0.0
    for rank in range(ranks):
        shard = total.empty()
        shard.arrays = {name: array * drawn.uniform(0.5, 1.5) for name, array in shares[rank % STAGES].items()}
        started = time.process_time()
        total.merge(shard)
        merging += time.process_time() - started
    seconds["merge"] = merging
    if ranks != RANKS:
        return {"seconds": {"merge": round(merging, 4)}}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        started = time.process_time()
        yield
        seconds[name] = time.process_time() - started

    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(Path(folder) / "run", config.as_dict(), overwrite=False, resume_step=None)
        with timed("request"):
            step = StepModel(layout, load_cost_model("h200"))
            times = step.option_times(set(map(Format, config.formats)))
            request = config.request(times=times)
        coordinator = RankZeroCoordinator(config, request, rows, None, run)
        sidecar: Any = coordinator._sidecar
        with timed("table"):
            table = total.to_table(step=STEP, tokens=int(TOKENS), tokens_per_step=int(TOKENS), meta={})
            assert not table.non_finite()
        with timed("submit"):
            coordinator.submit(STEP, table, 1)
        candidates, started, solver_peak = None, time.perf_counter(), 0
        while candidates is None:  # training goes on meanwhile
            time.sleep(0.01)
            solver_peak = max(solver_peak, _peak_of(sidecar.pid))
            with timed("receive"):  # the last one counts, in which the files of problem and scores are written
                candidates = coordinator.decision(STEP, 1)
        latency = time.perf_counter() - started
        assert candidates, "the update failed"
        chosen = candidates[0].precision_map
        with timed("decision"):
            message = pickle.dumps(candidates)
        with timed("adopt"):
            coordinator.record_adoption(STEP, chosen)
            coordinator.event(STEP, "adopt", achieved_per_stage=dict(chosen.achieved_per_stage))
        with timed("close"):
            coordinator.close()
        files = {str(path.relative_to(run.path)): path.stat().st_size for path in run.path.rglob("*") if path.is_file()}
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds["solver_process"] = children.ru_utime + children.ru_stime
    return {
        "linears": len(rows),
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "until_answer_wall_seconds": round(latency, 1),
        "status": chosen.status,
        "bytes": {
            "table": sum(array.nbytes for array in table.arrays.values()),
            "decision": len(message),
            "written": sum(files.values()),
        },
        "files": len(files),
        "rss_mb": {"grown": _mb(_rss() - base_rss), "solver_peak": _mb(solver_peak)},
    }


def _shares(layout: Layout, config: SnipConfig, ranks: int) -> list[dict[str, np.ndarray]]:
    """Return what a rank of each stage adds to the table on average."""
    rows, formats = layout.model.rows, config.measured_formats
    drawn = np.random.default_rng(1)
    shapes = array_shapes(rows, formats, sinks_of(layout.model))
    arrays = {name: drawn.lognormal(0.0, 0.5, shape) for name, shape in shapes.items()}
    arrays["by_format.c2"] = synthetic_losses(rows, tuple(map(Format, formats)))[:, 0] * 2.0 / TOKENS
    stage_of = np.array([row.stage for row in rows])
    shares = []
    for stage in range(STAGES):
        mine = np.where(stage_of == stage, STAGES / ranks, 0.0)
        shares.append(
            {
                name: array * (mine.reshape(-1, *[1] * (array.ndim - 1)) if len(array) == len(rows) else 1.0 / ranks)
                for name, array in arrays.items()
            }
        )
    return shares


def _rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _peak_of(pid: int | None) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def _mb(size: float) -> float:
    return round(size / 1e6, 1)


# -- a rank ----------------------------------------------------------------------------------------------------------
class _Handle(SimpleNamespace):
    """A linear of the rank, by what recorders and reductions read of it. Its weight has no elements."""

    def __hash__(self) -> int:
        return id(self)


class _Registry(list[Any]):
    """The linears of the rank."""

    def start_step(self, step: int) -> None:
        pass


class _Step(SimpleNamespace):
    """A training step whose passes only fill the recorders, and whose gradients have no memory."""

    step, microbatches, sequences = STEP, 1, 1

    def undisturbed(self) -> Any:
        return nullcontext()

    def prepare(self, microbatches: int, sequences: int) -> None:
        pass

    def run(self) -> None:
        from snip_megatron.sensitivity.recorder import OutputErrorDots, Pass

        for handle in self.handles:
            recorder, rows = handle.state.recorder, handle.rows
            if recorder.phase is not Pass.STATISTICS:
                continue
            formats, sampled = len(recorder.formats), self.torch.arange(min(rows, OUTPUT_TOKENS))
            every = self.torch.ones(1 + formats, rows, dtype=self.torch.float64)
            dots = every if rows > OUTPUT_TOKENS else None
            recorder.dots.append(OutputErrorDots(every[1:, : len(sampled)], sampled, every[0], dots))
            recorder.sums |= dict.fromkeys(("x2", "g2", "s2"), self.torch.ones((), dtype=self.torch.float64))

    def gradient_scale(self) -> float:
        return 1.0

    def gradient(self, weight: Any) -> Any:
        local = self.torch.empty(tuple(weight.shape))  # never read or written
        if weight is self.norm and self.token_shards:
            self.dist.all_reduce(local, group=self.of_tp)
        return local

    def join_gradients(self) -> None:
        pass

    def update_of(self, weight: Any) -> None:
        return None


def one_rank(model: str, layers: int, ranks: int) -> Body:
    """Run an update with ``noise`` as a rank that is not rank 0. Returns its collectives, seconds and memory."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from snip_megatron.runtime.exchange import MapChannel, StepReport, Transaction
    from snip_megatron.runtime.host import LocalSink
    from snip_megatron.runtime.probe import ProbeRunner
    from snip_megatron.runtime.probe_memory import Fit
    from snip_megatron.sensitivity.reduction import ProbeGroups

    layout, config, cpu = layout_of(model, layers, ranks), _config("noise"), torch.device("cpu")
    tp, ep, dp = layout.tp, layout.ep, layout.dp
    rank = tp * ep if ep < dp else tp  # of the first stage; data parallel rank 1 of experts, or else of dense weights
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    of_dp, of_tp = dist.new_group(list(range(0, tp * dp, tp))), dist.new_group(list(range(rank, rank + tp)))
    experts_dp = range(rank % (tp * ep), tp * dp, tp * ep)
    of_experts = ProbeGroups(dist.new_group([rank]), dist.new_group(list(experts_dp)))
    groups = ProbeGroups(of_tp, of_dp, of_experts if ep > 1 else None)
    names = {of_dp: "data", of_tp: "tensor", of_experts.dp: "expert data", of_experts.tp: "expert tensor"}
    calls: dict[str, list[int]] = {}
    message, genuine = pickle.dumps(()), {name: getattr(dist, name) for name in ("all_reduce", "broadcast")}

    def counted(name: str) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            entry = calls.setdefault(names.get(kwargs.get("group"), "world"), [0, 0])
            entry[0], entry[1] = entry[0] + 1, entry[1] + tensor.nbytes
            if name == "broadcast":  # what rank 0 sends
                tensor.copy_(torch.tensor([len(message)] if tensor.dtype == torch.int64 else list(message)))
            elif tensor.dim() == 2 and kwargs.get("group") is None:  # a row of each rank, all alike
                tensor[:] = tensor[rank].clone()
            return genuine[name](tensor, *args, **kwargs)

        return call

    for name in genuine:
        setattr(dist, name, counted(name))
    rows = [row for layer in layout.stages[0] for row in layer]
    norms = len({row.sub_block for row in rows if row.role is Role.READS})
    handles = []
    for index, row in enumerate(each for each in rows for _ in range(layout.matrices(each))):
        local = layout.shapes[row.name]
        handles.append(
            _Handle(
                name=row.name, index=index, expert=index if row.experts > 1 else None, tp_rank=0, repeats=False,
                rows=local.tokens, parallel="column", state=SimpleNamespace(recorder=None),
                weight=SimpleNamespace(device=cpu, shape=(local.n, local.k)),
                out_features=range(local.n), in_features=range(local.k),
            )
        )  # fmt: skip
    norm = torch.nn.Parameter(torch.empty(layout.model.hidden, device="meta"))
    embedding = torch.nn.Parameter(torch.empty(layout.vocabulary * layout.model.hidden // tp, device="meta"))
    local_sinks = [LocalSink(1, norm, replicated=True)] * norms + [LocalSink(0, embedding)]
    host: Any = SimpleNamespace(
        groups=groups, local_sinks=local_sinks, optimizer_sharded=True, device=cpu, full_tensor=lambda weight: weight,
        sinks=tuple(sinks_of(layout.model)), segments=[], hook_input=None, hidden=layout.model.hidden,
        tokens=layout.tokens, pass_group=1,
        passes_alone=False, gathers_updates=False, shard=None, is_recomputing=lambda: False,
    )  # fmt: skip

    registry: Any = _Registry(handles)
    registry.rows, registry.names = layout.model.rows, [row.name for row in layout.model.rows]
    registry.context = SimpleNamespace(probing=False)
    step: Any = _Step(
        torch=torch, dist=dist, handles=handles, norm=norm, token_shards=layout.sequence_parallel, of_tp=of_tp
    )
    probes: Any = ProbeRunner(host, registry, config, weighs_updates=True)
    probes.check_memory = lambda step: Fit(1, 1, 1.0, 1.0, 2.0)
    base, started = _rss(), time.process_time()
    probes.measure(step, 1.0)
    channel = MapChannel(registry.names, cpu)
    Transaction(channel.device).together("submission", lambda: 0.0)
    channel.agree(None)
    seconds, of_update = time.process_time() - started, {name: list(entry) for name, entry in calls.items()}
    report, of_report = StepReport(cpu), time.process_time()
    for number in range(100):
        report.exchange(number, None, 1.0)
    expected: dict[str, list[int]] = {}
    for part in update_collectives(layout, 0, config, len(message)):
        if part.part in ("votes about forwards", "measured rises"):  # this update measures no map
            continue
        count, size = expected.get(part.group, [0, 0])
        expected[part.group] = [count + part.count, size + part.bytes]
    return {
        "collectives": of_update,
        "as_planned": of_update == expected,
        "seconds": {"update": round(seconds, 4), "report_of_a_step": round((time.process_time() - of_report) / 100, 6)},
        "rss_mb": {"grown": _mb(_rss() - base)},
    }


# -- all cases -------------------------------------------------------------------------------------------------------
SIDES: dict[str, Callable[[str, int, int], Body]] = {"rank 0": rank_zero, "a rank": one_rank}


def run_case(side: str, model: str, layers: int, ranks: int) -> Body:
    """Run a case in a process of its own. Returns its result."""
    command = [sys.executable, "-m", "benchmarks.reliability.scale", "--case", json.dumps([side, model, layers, ranks])]
    process = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"{side}, {model}, {layers} layers: {process.stderr[-2000:]}")
    result: Body = json.loads(process.stdout.splitlines()[-1])
    return {"side": side, "model": model, "layers": layers, "ranks": ranks} | result


def growth(cases: list[Body], fixed: str, varied: str) -> Iterator[Body]:
    """Yield the exponents with which the figures of cases grow while ``varied`` doubles and ``fixed`` is constant."""
    for case in cases:
        same = (each for each in cases if all(each[key] == case[key] for key in ("side", "model", fixed)))
        half = next((each for each in same if 2 * each[varied] == case[varied]), None)
        if half is not None:
            figures = {
                f"{kind} {name}": round(math.log2(value / half[kind][name]), 2)
                for kind in ("bytes", "seconds")
                for name, value in case.get(kind, {}).items()
                if value > 0 and half.get(kind, {}).get(name, 0.0) > 0
            }
            place = {"side": case["side"], "model": case["model"], "doubled": varied, "to": case[varied]}
            yield place | {"exponents": figures}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability.scale", description=__doc__)
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--commit")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        side, *sizes = args.case
        print(json.dumps(SIDES[side](*sizes)))
        return 0
    cases = []
    for model, layers in MODELS.items():
        sizes = [(layers // 2, RANKS), (layers, RANKS // 2), (layers, RANKS), (layers, 2 * RANKS), (2 * layers, RANKS)]
        for side in SIDES:
            for size in sizes:
                cases.append(run_case(side, model, *size))
                print(json.dumps(cases[-1]), flush=True)
    grown = [*growth(cases, "ranks", "layers"), *growth(cases, "layers", "ranks")]
    write(args.out, header(args.commit) | {"cases": cases, "growth": grown})
    return 0


if __name__ == "__main__":
    sys.exit(main())

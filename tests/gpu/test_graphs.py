"""Trainings with CUDA graphs are those without: every implementation, an adoption in the middle, resumes.

The trainings are real runs of the entry, several at once on the GPU; each is started once, by the first test.
"""

import importlib.util
import json
import os
import shlex
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import can_fork, run_ranks

from snip_megatron.numerics.products.deepgemm import why_not
from snip_megatron.runtime.exchange import EXIT_UPDATE_BROKEN
from snip_megatron.runtime.run_data import read_metrics

STEPS, SAVED, ADOPTED, LAYERS = 14, 8, 5, 4
AT_ONCE = {1: max(2, int(os.environ.get("AT_ONCE", 12)) * 2 // 3), 2: 2}
"""Trainings at the same time, by ranks: fewer than of test_families.py, which has more. Collectives of many that take
turns hardly ever run on both GPUs at once."""
IMPLEMENTATIONS = ("local", "transformer_engine", "full_iteration")
LLAMA = shlex.split(f"""
--num-layers {LAYERS} --hidden-size 512 --ffn-hidden-size 1024 --num-attention-heads 8 --seq-length 256
--max-position-embeddings 256 --position-embedding-type rope --normalization RMSNorm --swiglu
--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
--micro-batch-size 2 --global-batch-size 12 --bf16 --use-distributed-optimizer
--transformer-impl transformer_engine --te-rng-tracker --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
--lr-decay-iters 20 --weight-decay 0.1 --clip-grad 1.0 --seed 1234 --log-interval 1 --num-workers 0 --mock-data
--tokenizer-type NullTokenizer --vocab-size 255 --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable
--disable-jit-fuser --no-check-for-nan-in-loss-and-grad --eval-interval 7 --eval-iters 2
""")
QUERY_GROUPS = ("--group-query-attention", "--num-query-groups", "4")  # without latent attention
UPDATED = "--snip-first-update 3 --snip-update-interval 6 --snip-lag 2 --snip-wait 120 --snip-eval both"
MAPS = {
    "plain": "",
    "bf16": "--snip --snip-policy bf16",
    "fp8": "--snip --snip-policy uniform-fp8",
    "fp8_tensor": "--snip --snip-policy bf16 --snip-pin '*=fp8_tensor'",
    "fp4": f"--snip --snip-budget fp4=0.75 {UPDATED}",
    "tensor_and_fp4": f"--snip --snip-budget fp4=0.5 --snip-formats fp8_tensor,fp4 {UPDATED}",
    "bf16_wgrads": f"--snip --snip-budget fp4=0.3 --snip-pin '*.experts.*:wgrad=bf16' {UPDATED}",
}
"""Those with a budget probe before steps 3 and 9, from 0, and adopt before 5 and 11."""
LAYOUTS = {
    "one": (1, ""),
    "tensor": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pipeline": (2, "--pipeline-model-parallel-size 2"),
    "data": (2, "--overlap-grad-reduce --overlap-param-gather"),
}
"""Ranks, and Megatron's arguments."""
EXPERTS = shlex.split("""
--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-grouped-gemm --moe-token-dispatcher-type alltoall
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-router-enable-expert-bias
--moe-router-score-function sigmoid --moe-shared-expert-intermediate-size 256 --moe-layer-freq [0]*1+[1]*3
""")
"""The first layer is dense; its MLP runs outside of graphs too."""
LATENT = shlex.split("""
--multi-latent-attention --q-lora-rank 256 --kv-lora-rank 128 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64
--rope-type rope --no-rope-fusion --mtp-num-layers 1
""")
BESIDE_EXPERTS = {
    "experts": ("attn", "moe_router", "moe_preprocess"),
    "router": ("moe_router",),
    "latent": ("attn", "moe_router", "moe_preprocess"),
}
"""Name → the parts of layers that Transformer Engine's graphs hold beside experts."""
HOLDING_EXPERTS = ("--cuda-graph-modules", "attn", "mlp", "moe")
ONE_RANK = ("--moe-permute-fusion", "--overlap-grad-reduce", "--overlap-param-gather")
TWO_GPUS = [
    (layout, graphs)
    for layout in ("tensor", "pipeline", "data")
    for graphs in IMPLEMENTATIONS
    if layout != "pipeline" or graphs == "transformer_engine"  # the others are refused
]
FP8_SUMS = ("--snip-gradient-reduction", "fp8")


class Trainings:
    """Runs in ``folder``, started when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pools = {ranks: ThreadPoolExecutor(count) for ranks, count in AT_ONCE.items()}
        self._runs: dict[tuple[str, ...], Future[dict[str, Any]]] = {}
        self._first: dict[tuple[Any, ...], Future[dict[str, Any]]] = {}  # of those that need the same kernels

    def begin(self, kind: str, graphs: str | None, *extra: str, layout: str = "one") -> Future[dict[str, Any]]:
        key = (kind, str(graphs), layout, *extra)
        if key not in self._runs:
            self._runs[key] = self._submit(kind, graphs, extra, layout)
        return self._runs[key]

    def saving(self, kind: str, graphs: str | None) -> Future[dict[str, Any]]:
        return self.begin(kind, graphs, "--save", "{run}/checkpoint", "--save-interval", str(SAVED))

    def resumed(self, kind: str, graphs: str | None) -> Future[dict[str, Any]]:
        """The training that :meth:`saving` began, resumed from its first checkpoint."""
        key = (kind, str(graphs), "resumed")
        if key not in self._runs:
            saved, number = self.saving(kind, graphs), len(self._runs)

            def resume() -> dict[str, Any]:
                checkpoint = Path(saved.result()["folder"]) / "checkpoint"
                (checkpoint / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
                return self._train(number, kind, graphs, ("--load", str(checkpoint)), "one")

            self._runs[key] = self._pools[1].submit(resume)
        return self._runs[key]

    def failing(self, graphs: str, kind: str) -> Future[dict[str, Any]]:
        """An fp4 training whose first capture fails after the adoption before step :data:`ADOPTED`."""
        key = ("failing", graphs, kind)
        if key not in self._runs:
            self._runs[key] = self._submit("fp4", graphs, (), "one", {"FAIL": f"{ADOPTED}:{kind}"})
        return self._runs[key]

    def _submit(self, kind: str, graphs: str | None, extra: tuple[str, ...], layout: str, failure: Any = None) -> Any:
        """Start a training when the first one with the same kernels has ended, which has compiled them."""
        same = kind, layout, "--num-experts" in extra
        first, number = self._first.get(same), len(self._runs)

        def train() -> dict[str, Any]:
            wait([] if first is None else [first])
            return self._train(number, kind, graphs, extra, layout, failure)

        future = self._pools[LAYOUTS[layout][0]].submit(train)
        self._first.setdefault(same, future)
        return future

    def end(self) -> None:
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)

    def _train(
        self, number: int, kind: str, graphs: str | None, extra: tuple[str, ...], layout: str, failure: Any = None
    ) -> dict[str, Any]:
        run = self._folder / f"{number}-{kind}-{graphs}-{layout}"
        run.mkdir()
        snip = shlex.split(MAPS[kind])
        snip += ["--snip-dir", str(run / "snip")] if snip else []
        captured = [] if graphs is None else ["--cuda-graph-impl", graphs]
        ranks, parallel = LAYOUTS[layout]
        grouped = () if "--multi-latent-attention" in extra else QUERY_GROUPS
        arguments = [*LLAMA, *grouped, "--train-iters", str(STEPS), *snip, *captured, *shlex.split(parallel)]
        arguments += [each.format(run=run) for each in extra]
        logs = [run / f"log{rank}" for rank in range(ranks)]
        environment = {"TRACE": str(run / "trace"), "OMP_NUM_THREADS": "1", "NCCL_MAX_CTAS": "8"} | (failure or {})
        codes = run_ranks(
            ranks, "graphed_pretrain", arguments, folder=run, environment=environment, timeout=420,
            outputs=[(log, log) for log in logs],
        )  # fmt: skip
        if any(codes) and failure is None:
            texts = "\n".join(log.read_text()[-3000:] for log, code in zip(logs, codes, strict=True) if code)
            raise RuntimeError(f"{run.name}: exit codes {codes}\n{texts}")
        bodies = [json.loads((run / "trace" / f"rank{rank}.json").read_text()) for rank in range(ranks)]
        body: dict[str, Any] = bodies[-1]  # the last pipeline stage has the losses
        for name in ("losses", "grad_norms", "replays"):
            body[name] = {int(step): value for step, value in body[name].items()}
        body["weights"] = [each["weights"] for each in bodies]
        events = run / "snip" / "events.jsonl"
        body["events"] = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
        return body | {"folder": str(run), "codes": codes, "log": logs[-1].read_text(errors="replace")}


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine")
    path = os.environ.get("GRAPH_RUNS")  # where to look at them afterwards
    folder = Path(path) if path else tmp_path_factory.mktemp("graphs")
    folder.mkdir(parents=True, exist_ok=True)
    can_fork()
    trainings = Trainings(folder)
    yield trainings
    trainings.end()


@pytest.fixture(scope="module")
def on_one(trainings: Trainings) -> Trainings:
    """Everything that the tests of one GPU ask for, begun at once."""
    for kind in ("fp4", "fp8_tensor", "fp8"):
        for graphs in (None, *IMPLEMENTATIONS):
            trainings.begin(kind, graphs)
    for kind in ("bf16", "plain"):
        trainings.begin(kind, "local")
    for graphs in ("local", "transformer_engine"):
        trainings.saving("fp4", graphs)
    for graphs in ("local", "transformer_engine"):
        trainings.resumed("fp4", graphs)
    for failing in IMPLEMENTATIONS:
        for kind in ("exception", "memory"):
            trainings.failing(failing, kind)
    return trainings


def beside_experts(trainings: Trainings, name: str, kind: str, *, graphs: bool = True) -> Future[dict[str, Any]]:
    """Begin a training with experts, with the graphs of a name or without."""
    model = [*EXPERTS, *(LATENT if name == "latent" else [])]
    if not graphs:
        return trainings.begin(kind, None, *model)
    return trainings.begin(kind, "transformer_engine", *model, "--cuda-graph-modules", *BESIDE_EXPERTS[name])


def holding_experts(trainings: Trainings, kind: str, *, graphs: bool = True) -> Future[dict[str, Any]]:
    """Begin a training whose graphs may hold experts, or the same without graphs."""
    if not graphs:
        return trainings.begin(kind, None, *EXPERTS, *ONE_RANK)
    return trainings.begin(kind, "transformer_engine", *EXPERTS, *ONE_RANK, *HOLDING_EXPERTS)


@pytest.fixture(scope="module")
def with_experts(trainings: Trainings) -> Trainings:
    """Everything that the tests of experts ask for, begun at once."""
    for name, kind in (*((name, "fp4") for name in BESIDE_EXPERTS), ("experts", "fp8")):
        beside_experts(trainings, name, kind)
        beside_experts(trainings, name, kind, graphs=False)
    for kind in ("plain", "bf16"):
        beside_experts(trainings, "experts", kind)
    for kind in ("bf16_wgrads", "fp8", "fp8_tensor"):
        for graphs in (False, True):
            holding_experts(trainings, kind, graphs=graphs)
    return trainings


@pytest.fixture(scope="module")
def on_two(trainings: Trainings) -> Trainings:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for layout, graphs in TWO_GPUS:
        trainings.begin("tensor_and_fp4", None, layout=layout)
        trainings.begin("tensor_and_fp4", graphs, layout=layout)
    for graphs in (None, *IMPLEMENTATIONS):
        trainings.begin("tensor_and_fp4", graphs, *FP8_SUMS, layout="data")
    return trainings


def close_steps(expected: dict[str, Any], actual: dict[str, Any], bound: float = 2e-3) -> None:
    """Losses of a captured step that read an old key, map or weight would be another run's within a few steps."""
    for name in ("losses", "grad_norms"):
        for step, value in actual[name].items():
            assert float.fromhex(value) == pytest.approx(float.fromhex(expected[name][step]), rel=bound), (name, step)


def same_steps(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    for name in ("losses", "grad_norms"):
        different = {step for step in actual[name] if actual[name][step] != expected[name][step]}
        assert not different, f"{name} differ first at step {min(different)}"
    assert actual["weights"] == expected["weights"]


@pytest.mark.parametrize("graphs", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["fp8", "fp8_tensor", "fp4"])
def test_graphs_train_alike(on_one: Trainings, kind: str, graphs: str) -> None:
    eager, captured = on_one.begin(kind, None).result(), on_one.begin(kind, graphs).result()
    assert not any(eager["replays"].values())
    assert captured["replays"][STEPS] > 0
    assert len(captured["losses"]) == len(set(captured["losses"].values())) == STEPS
    close_steps(eager, captured)


def test_an_all_bf16_map_trains_plain_megatron_s_bits_in_graphs(on_one: Trainings) -> None:
    plain, mapped = on_one.begin("plain", "local").result(), on_one.begin("bf16", "local").result()
    assert plain["replays"] == mapped["replays"]
    assert plain["replays"][STEPS] > 0
    same_steps(plain, mapped)


@pytest.mark.parametrize("graphs", ["local", "transformer_engine"])
def test_a_resumed_run_goes_on_bit_for_bit(on_one: Trainings, graphs: str) -> None:
    whole, resumed = on_one.saving("fp4", graphs).result(), on_one.resumed("fp4", graphs).result()
    assert min(resumed["losses"]) == SAVED + 1
    assert resumed["replays"][STEPS] > 0
    same_steps(whole, resumed)


@pytest.mark.parametrize("kind", ["exception", "memory"])
@pytest.mark.parametrize("graphs", IMPLEMENTATIONS)
def test_a_capture_that_fails_after_an_adoption_ends_in_a_line(on_one: Trainings, graphs: str, kind: str) -> None:
    undisturbed, failed = on_one.begin("fp4", graphs).result(), on_one.failing(graphs, kind).result()
    log = failed["log"]
    assert failed["codes"] == [EXIT_UPDATE_BROKEN], log[-4000:]
    (line,) = [line for line in log.splitlines() if line.startswith("pretrain_gpt: ")]
    assert f"; SNIP's work of step {ADOPTED + (graphs == 'full_iteration')} failed" in line, line
    assert not any(line.startswith("Traceback") for line in log.splitlines()), log[-4000:]  # torch logs others
    assert len(failed["losses"]) == ADOPTED + (graphs == "full_iteration")
    for name in ("losses", "grad_norms"):
        assert failed[name] == {step: undisturbed[name][step] for step in failed[name]}
    assert [event["step"] for event in failed["events"] if event["event"] == "adopt"] == [ADOPTED]
    rows = read_metrics(Path(failed["folder"]) / "snip")
    assert [row["step"] for row in rows] == list(range(len(failed["losses"]) - 1))  # the last come with the next step's


@pytest.mark.parametrize(("name", "kind"), [*((name, "fp4") for name in BESIDE_EXPERTS), ("experts", "fp8")])
def test_graphs_beside_experts_train_alike(with_experts: Trainings, name: str, kind: str) -> None:
    eager = beside_experts(with_experts, name, kind, graphs=False).result()
    captured = beside_experts(with_experts, name, kind).result()
    assert captured["replays"][STEPS] > 0
    close_steps(eager, captured, 2e-2)  # a token whose experts are nearly equal may go to the other one
    assert any(event["event"] == "recapture" for event in captured["events"]) == (kind == "fp4")


def test_an_all_bf16_map_trains_plain_megatron_s_bits_in_graphs_beside_experts(with_experts: Trainings) -> None:
    plain, mapped = (beside_experts(with_experts, "experts", kind).result() for kind in ("plain", "bf16"))
    assert plain["replays"] == mapped["replays"]
    assert plain["replays"][STEPS] > 0
    same_steps(plain, mapped)


@pytest.mark.skipif(why_not() is not None, reason=f"DeepGEMM {why_not()}")
def test_graphs_hold_experts_from_the_first_map_on(with_experts: Trainings) -> None:
    """The first map is adopted before step 5. Before it, experts are Transformer Engine's, which no graph can hold."""
    eager = holding_experts(with_experts, "bf16_wgrads", graphs=False).result()
    captured = holding_experts(with_experts, "bf16_wgrads").result()
    assert "CUDA graphs hold the experts of 3 of 3 layers\n" in captured["log"]
    kinds = [event["event"] for event in captured["events"]]
    assert kinds.count("recapture") >= 1, kinds
    assert captured["replays"][STEPS] == LAYERS * 2 * 6  # forward and backward of six microbatches
    close_steps(eager, captured, 2e-2)


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        pytest.param("fp8", "3 of 3 layers\n", marks=pytest.mark.skipif(why_not() is not None, reason="no DeepGEMM")),
        ("fp8_tensor", "0 of 3 layers: decoder.layers.1.mlp"),  # one scale an expert: they run one by one
    ],
)
def test_graphs_hold_experts_whose_gemms_are_one_launch(with_experts: Trainings, kind: str, layers: str) -> None:
    eager = holding_experts(with_experts, kind, graphs=False).result()
    captured = holding_experts(with_experts, kind).result()
    assert f"CUDA graphs hold the experts of {layers}" in captured["log"]
    assert captured["replays"][STEPS] > 0
    close_steps(eager, captured, 2e-2)


@pytest.mark.two_gpus
@pytest.mark.parametrize(("layout", "graphs"), TWO_GPUS)
def test_graphs_train_alike_on_two_gpus(on_two: Trainings, layout: str, graphs: str) -> None:
    eager = on_two.begin("tensor_and_fp4", None, layout=layout).result()
    captured = on_two.begin("tensor_and_fp4", graphs, layout=layout).result()
    assert captured["replays"][STEPS] > 0
    adoptions = [event["changed"] for event in captured["events"] if event["event"] == "adopt"]
    assert len(adoptions) == 2  # on random tokens, the second map may be the first one
    assert (
        len([event for event in captured["events"] if event["event"] == "recapture"]) == sum(map(bool, adoptions)) > 0
    )
    close_steps(eager, captured)


@pytest.mark.two_gpus
@pytest.mark.parametrize("graphs", IMPLEMENTATIONS)
def test_graphs_train_alike_with_gradients_in_fp8_on_two_gpus(on_two: Trainings, graphs: str) -> None:
    eager = on_two.begin("tensor_and_fp4", None, *FP8_SUMS, layout="data").result()
    captured = on_two.begin("tensor_and_fp4", graphs, *FP8_SUMS, layout="data").result()
    assert captured["replays"][STEPS] > 0
    close_steps(eager, captured)
    exact = on_two.begin("tensor_and_fp4", None, layout="data").result()
    assert exact["losses"][STEPS] != eager["losses"][STEPS]

"""Small models of the families that people train, through the real ``pretrain``, on one GPU and on two.

Each family trains 30 steps: stock in bf16; under an all-bf16 map, and from the checkpoint of each on in the other, bit
for bit as without interruption; and under updated maps, with losses near those of bf16, resumed bit for bit.
Transformer Engine's own linears run a map too (``--snip-gemm transformer_engine``), and once it is exported without
SNIP. On two GPUs, experts also exchange
tokens behind computation, with delayed wgrads and with CUDA graphs. Only the trainings of the chosen tests run.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import REPOSITORY, can_fork, run_ranks

from snip_megatron.tools.cli import main as command

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"
)
STEPS, SAVED = 30, 15
AT_ONCE = int(os.environ.get("AT_ONCE", max(2, len(os.sched_getaffinity(0)) // 4)))
COMMON = """
--num-layers 4 --hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1024 --seq-length 256
--max-position-embeddings 256 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2
--global-batch-size 8 --bf16 --transformer-impl transformer_engine --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
--weight-decay 0.1 --clip-grad 1.0 --seed 1234 --log-interval 1 --num-workers 0 --mock-data
--tokenizer-type NullTokenizer --vocab-size 255 --disable-jit-fuser --eval-interval 1000 --eval-iters 0
"""
WHOLE = "--use-distributed-optimizer --ckpt-format torch_dist"
DENSE = "--group-query-attention --num-query-groups 4 --qk-layernorm"
MLA = """
--multi-latent-attention --q-lora-rank 256 --kv-lora-rank 128 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64
--rope-type rope --no-rope-fusion
"""
EXPERTS = """
--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-grouped-gemm --moe-token-dispatcher-type alltoall
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
"""
SHARED = "--moe-shared-expert-intermediate-size 256"
DELTA = """
--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --attention-output-gate --deterministic-mode
--linear-conv-kernel-dim 4 --linear-key-head-dim 64 --linear-value-head-dim 64 --linear-num-key-heads 4
--linear-num-value-heads 8
"""
MAMBA = """
--hybrid-layer-pattern ME*-ME/*E --mtp-num-layers 1 --disable-mamba-mem-eff-path --mamba-state-dim 64
--mamba-head-dim 16 --mamba-num-groups 4 --deterministic-mode
"""
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor"
FAMILIES = {
    "dense": f"{WHOLE} {DENSE}",
    "mla": f"{WHOLE} {MLA} --mtp-num-layers 2 --mtp-use-repeated-layer",
    "experts": f"{WHOLE} {DENSE} {EXPERTS}",
    "mla_experts": f"{WHOLE} {MLA} --mtp-num-layers 1 {EXPERTS} {SHARED} --moe-layer-freq [0]*1+[1]*3"
    " --moe-shared-expert-overlap --recompute-granularity selective --recompute-modules mla_up_proj moe_act",
    "latent_experts": f"{WHOLE} {DENSE} {EXPERTS} {SHARED} --moe-latent-size 128",
    "delta_experts": f"{WHOLE} {DENSE} {DELTA} {EXPERTS} {SHARED} --moe-shared-expert-gate",
    "mamba_experts": f"{WHOLE} {DENSE} {MAMBA} {EXPERTS} {SHARED}",
    "activations": f"{WHOLE} {DENSE} {EXPERTS} --fine-grained-activation-offloading --offload-modules qkv_linear"
    " core_attn attn_proj expert_fc1 moe_act --min-offloaded-tensor-size 1",
    "layers_offloaded": f"{WHOLE} {DENSE} --cpu-offloading-num-layers 2",
    "offloaded": f"{WHOLE} {DENSE} --use-precision-aware-optimizer --optimizer-cpu-offload"
    " --optimizer-offload-fraction 0.5",
}
"""Megatron's arguments on one GPU."""
if not importlib.metadata.version("megatron-core").startswith("0.19"):
    FAMILIES["grouped_tensors"] = f"{FAMILIES['experts']} --moe-use-grouped-tensor"
    FAMILIES["grouped_weights"] = f"{FAMILIES['grouped_tensors']} --moe-single-grouped-weight"
ON_TWO = {
    "experts_ep2": f"{FAMILIES['experts']} --expert-model-parallel-size 2",
    "tensor": f"{FAMILIES['dense']} --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap"
    " --tp-comm-bootstrap-backend nccl",
    "pipeline": f"{WHOLE} {DENSE} --pipeline-model-parallel-size 2 --defer-embedding-wgrad-compute",
    "fsdp": f"--use-distributed-optimizer {FSDP} --no-gradient-accumulation-fusion {DENSE}",
    "fsdp_experts": f"--use-distributed-optimizer {FSDP} --no-gradient-accumulation-fusion {DENSE} {EXPERTS}"
    " --expert-model-parallel-size 2",
    "fsdp2": f"--use-torch-fsdp2 --ckpt-format torch_dist --no-gradient-accumulation-fusion {DENSE}",
}
BF16 = "--snip --snip-policy bf16"
UPDATED = (
    "--snip --snip-estimator noise "
    "--snip-budget fp4=0.5 --snip-formats fp8,fp4 --snip-first-update 4 --snip-update-interval 12 --snip-lag 2"
    " --snip-wait 120"
)
RECIPE = (
    "--snip --snip-gemm transformer_engine --snip-policy uniform-fp8 --snip-pin *.linear_proj=fp8_tensor"
    " --snip-pin *.linear_fc1:wgrad=bf16"
)
GRAPHS = "--cuda-graph-impl transformer_engine --te-rng-tracker --cuda-graph-modules attn moe_router moe_preprocess"
TRAININGS = {
    "stock": ("", None),
    "bf16": (BF16, None),
    "updated": (UPDATED, None),
    "recipe": (RECIPE, None),
    "overlapped": (f"{UPDATED} --overlap-moe-expert-parallel-comm --delay-wgrad-compute", None),
    "graphs": (f"{UPDATED} --overlap-moe-expert-parallel-comm {GRAPHS}", None),
    "delayed_graphs": (f"{UPDATED} --overlap-moe-expert-parallel-comm --delay-wgrad-compute {GRAPHS}", None),
    "factory": (
        "--fp8-format e4m3 --fp8-recipe custom --fp8-quantizer-factory snip_te_map.quantizer_factory",
        "recipe",
    ),
    "file": ("--te-precision-config-file exported/stage_0.yaml", "recipe"),
    "again": ("", "stock"),
    "there": (BF16, "stock"),
    "back": ("", "bf16"),
    "resumed": (UPDATED, "updated"),
}
"""Name → its further arguments, and the training, named before it, from whose first checkpoint it goes on, or whose map
is exported (:data:`EXPORTED`).
"""
EXPORTED = {"factory": "te", "file": "megatron"}
"""Training → ``--format`` of ``snip export``."""
PINS = {
    ("recipe", "--num-experts"): " --snip-pin *.experts.linear_fc2:dgrad=bf16",
    ("updated", "--tp-comm-overlap"): " --snip-pin *.linear_qkv=bf16",
}
"""A training's further pins in families with an argument."""
ALIKE = [("stock", "bf16"), ("stock", "there"), ("bf16", "back"), ("updated", "resumed")]
OTHER_PAIRS = {"offloaded": [("stock", "bf16"), ("again", "there")]}
"""The pairs of a family that Megatron itself does not resume bit for bit: its losses differ from the second step on."""
NEAR = {name: ["updated", "recipe"] for name in FAMILIES} | {name: ["updated"] for name in ON_TWO}
NEAR["dense"] += ["factory", "file"]
NEAR["experts"] += ["factory"]
NEAR["experts_ep2"] += ["overlapped", "graphs", "delayed_graphs"]


@functools.cache
def multiplies_grouped_tensors() -> bool:
    """Return whether Transformer Engine's cuBLASLt has the GEMMs of grouped tensors on Hopper."""
    if not torch.cuda.is_available():
        return False
    with contextlib.suppress(Exception):  # broken: a training says so
        import transformer_engine.pytorch  # noqa: F401
        import transformer_engine_torch

        return int(transformer_engine_torch.get_cublasLt_version()) >= 130400
    return False


if (
    "grouped_tensors" in FAMILIES and not multiplies_grouped_tensors()
):  # tensors are split, and run and saved as those of "experts"
    OTHER_PAIRS["grouped_tensors"], NEAR["grouped_tensors"] = [("stock", "bf16")], ["updated"]


class Family:
    """The trainings of one family, in ``folder``."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._ranks, self._arguments = (2, ON_TWO[name]) if name in ON_TWO else (1, FAMILIES[name])
        self.results: dict[str, dict[str, Any]] = {}

    def train(self, name: str, source: Future[None] | None) -> None:
        """Train from the start, or from the first checkpoint of the training that has ``source``."""
        snip, load = TRAININGS[name]
        pinned = "updated" if snip == UPDATED else name  # a resume is of the same configuration
        snip += "".join(more for (of, having), more in PINS.items() if of == pinned and having in self._arguments)
        run = self._folder / name
        run.mkdir()
        arguments = [*shlex.split(COMMON + self._arguments), *shlex.split(snip), "--train-iters", str(STEPS)]
        if name not in ("again", "there", "back", "resumed"):
            arguments += ["--save", str(run / "saved"), "--save-interval", str(SAVED)]
        if source is not None:
            source.result()  # it began before, so that it never waits for this
        if name in EXPORTED:
            source_map = self._folder / str(load) / "snip" / "maps" / "step_0.json"
            words = ["export", "--format", EXPORTED[name], str(source_map), "--out", str(run / "exported")]
            assert command([*words, "--collapse"] if name == "file" else words) == 0
        elif source is not None:
            arguments += ["--load", str(self._folder / str(load) / "saved"), "--ckpt-step", str(SAVED)]
        if "--snip " in snip:
            arguments += ["--snip-dir", str(run / "snip")]
        paths, offload = [run / "exported"], "--fine-grained-activation-offloading" in self._arguments
        apex = name == "delayed_graphs" or "--defer-embedding-wgrad-compute" in arguments  # it adds to main_grad
        if apex:
            paths.insert(0, REPOSITORY / "benchmarks/jobs/stand_ins")
        # Megatron demands Transformer Engine's older code of its fine-grained offloading alone. It is read at import.
        environment = {"TRACE": str(run), "NVTE_CPU_OFFLOAD_V1": str(int(offload))}
        environment["NVTE_GROUPED_LINEAR_SINGLE_PARAM"] = "1"  # --moe-single-grouped-weight needs it too
        began = time.monotonic()
        codes = run_ranks(
            self._ranks, "graphed_pretrain", arguments, folder=run, environment=environment, timeout=420, paths=paths,
            outputs=[(run / "stdout", run / "stderr")] * self._ranks, fresh=apex or offload,
        )  # fmt: skip
        code = next(filter(None, codes), 0)
        said = f"{self._folder.name}/{name}: code {code} after {time.monotonic() - began:.0f} s"
        if code != 0:
            failed = (run / "stderr").read_text()
            said += f"\n{self.stdout(name)[-2000:]}\n{failed[max(failed.find('Traceback'), 0) :][:9000]}"  # the cause
        print(said, flush=True)  # at once, with pytest -s
        assert code == 0, said
        ranks = [json.loads((run / f"rank{rank}.json").read_text()) for rank in range(self._ranks)]
        # Only the last pipeline stage has losses.
        self.results[name] = ranks[-1] | {"weights": [rank["weights"] for rank in ranks]}
        for checkpoint in (run / "saved").glob("iter_*"):  # all of them would fill a small disk
            if checkpoint.name != f"iter_{SAVED:07d}":
                shutil.rmtree(checkpoint)

    def losses(self, name: str) -> list[float]:
        return [float.fromhex(each) for each in self.results[name]["losses"].values()]

    def adoptions(self, name: str) -> int:
        events = (self._folder / name / "snip" / "events.jsonl").read_text().splitlines()
        return sum(json.loads(line)["event"] == "adopt" for line in events)

    def stdout(self, name: str) -> str:
        return (self._folder / name / "stdout").read_text()


Trained = Callable[..., Family]
"""Returns a family of which the named trainings have succeeded."""


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """The trainings that the chosen tests look at. One that fails, fails these tests."""
    chosen = [each.callspec.params for each in request.session.items if each.path == Path(__file__)]  # type: ignore[attr-defined]
    expected = {(each["family"], name) for each in chosen for name in (each["whole"], each["name"])}
    expected |= {(family, load) for family, name in expected if (load := TRAININGS[name][1]) is not None}
    families, runs = {}, {}
    can_fork()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for family in [*FAMILIES, *ON_TWO]:
            if lacking(family) or not any(each == family for each, _ in expected):
                continue
            families[family] = Family(tmp_path_factory.mktemp(family), family)
        # Those that wait for another's checkpoint or map come last.
        for later in (False, True):
            for (family, of), (name, (_, load)) in itertools.product(families.items(), TRAININGS.items()):
                if (family, name) in expected and (load is not None) == later:
                    runs[family, name] = pool.submit(of.train, name, runs.get((family, load)))

        def succeeded(family: str, *names: str) -> Family:
            if needs := lacking(family):
                pytest.skip(f"needs {needs}")
            for name in names:
                runs[family, name].result()
            return families[family]

        yield succeeded


def lacking(family: str) -> str | None:
    """Return what this machine lacks to train the family."""
    if family in ON_TWO and torch.cuda.device_count() < 2:
        return "two GPUs"
    if family == "grouped_weights" and not multiplies_grouped_tensors():
        return "cuBLASLt 13.4 for Transformer Engine's grouped tensors"
    if family == "mamba_experts" and importlib.util.find_spec("mamba_ssm") is None:
        return "mamba_ssm, whose Triton kernels suffice"
    return None


def of_family(family: str, names: list[str]) -> list[Any]:
    marks = [pytest.mark.two_gpus] if family in ON_TWO else []
    return [pytest.param(family, name, marks=marks) for name in names]


@pytest.mark.parametrize("whole", ["stock"])
@pytest.mark.parametrize(("family", "name"), [each for family in NEAR for each in of_family(family, NEAR[family])])
def test_maps_train_nearly_as_bf16(trained: Trained, family: str, whole: str, name: str) -> None:
    result = trained(family, whole, name)
    stock, mapped = result.losses(whole), result.losses(name)
    assert len(mapped) == STEPS
    assert stock[-1] < stock[0]
    assert mapped != stock
    averages = [sum(losses[-5:]) / 5 for losses in (stock, mapped)]
    assert abs(averages[1] - averages[0]) < 0.01 * (stock[0] - stock[-1])  # of what was learnt: what is left is near 0
    if UPDATED in TRAININGS[name][0]:
        assert result.adoptions(name) == 2
        assert "stays bf16" not in result.stdout(name)
        assert (result.results[name]["replays"][str(STEPS)] > 0) == ("graphs" in name)


@pytest.mark.parametrize(
    ("family", "whole", "name"),
    [
        pytest.param(family, *pair, marks=[pytest.mark.two_gpus] if family in ON_TWO else [])
        for family in [*FAMILIES, *ON_TWO]
        for pair in OTHER_PAIRS.get(family, ALIKE)
    ],
)
def test_trainings_are_alike_bit_for_bit(trained: Trained, family: str, whole: str, name: str) -> None:
    """Stock and an all-bf16 map, from the start and from each other's checkpoints; updated maps."""
    result = trained(family, whole, name).results
    first = 1 if TRAININGS[name][1] is None else SAVED + 1
    for figures in ("losses", "grad_norms"):
        part = result[name][figures]
        assert sorted(map(int, part)) == list(range(first, STEPS + 1))
        differ = [step for step in part if part[step] != result[whole][figures][step]]
        assert not differ, f"{figures} of {name} differ from {whole}'s in {len(differ)} steps, first in {differ[0]}"
    assert result[name]["weights"] == result[whole]["weights"]

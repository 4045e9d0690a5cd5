"""Small models of the families that people train, through the real ``pretrain`` on one GPU.

Each family trains 30 steps: stock in bf16; from stock's checkpoint under an all-bf16 map, and on from there in stock,
bit for bit as without interruption; and under updated maps, with losses near those of bf16, resumed bit for bit.
Transformer Engine's own linears run a map too (``--snip-gemm transformer_engine``).
``SNIP_FAMILIES=NAME,...`` chooses families.
"""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"
)
REPOSITORY = Path(__file__).resolve().parents[2]
STEPS, FIRST, SECOND = 30, 10, 20
COMMON = """
--num-layers 4 --hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1024 --seq-length 256
--max-position-embeddings 256 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2
--global-batch-size 4 --bf16 --use-distributed-optimizer --transformer-impl transformer_engine --lr 1e-3 --min-lr 1e-4
--lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --seed 1234 --log-interval 1 --num-workers 0 --mock-data
--tokenizer-type NullTokenizer --vocab-size 255 --ckpt-format torch_dist --disable-jit-fuser --eval-interval 1000
--eval-iters 0
"""
LATENT = """
--multi-latent-attention --q-lora-rank 256 --kv-lora-rank 128 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64
--rope-type rope --no-rope-fusion
"""
EXPERTS = """
--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-grouped-gemm --moe-token-dispatcher-type alltoall
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
"""
DELTA = """
--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --attention-output-gate --deterministic-mode
--linear-conv-kernel-dim 4 --linear-key-head-dim 64 --linear-value-head-dim 64 --linear-num-key-heads 4
--linear-num-value-heads 8 --group-query-attention --num-query-groups 4 --qk-layernorm
"""
SHARED = "--moe-shared-expert-intermediate-size 256 --moe-layer-freq [0]*1+[1]*3"
DENSE = "--group-query-attention --num-query-groups 4 --qk-layernorm"
FAMILIES = {
    "dense": DENSE,
    "latent": f"{LATENT} --mtp-num-layers 2 --mtp-use-repeated-layer",
    "experts": f"{DENSE} {EXPERTS}",
    "latent_experts": f"{LATENT} --mtp-num-layers 1 {EXPERTS} {SHARED}",
    "delta_experts": f"{DELTA} {EXPERTS} --moe-shared-expert-intermediate-size 256 --moe-shared-expert-gate",
    "offloaded": f"{DENSE} --use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
}
"""Megatron's arguments. Gated delta nets need flash-linear-attention."""
BF16 = "--snip --snip-policy bf16"
UPDATED = (
    "--snip --snip-budget fp4=0.5 --snip-formats fp8,fp4 --snip-first-update 4 --snip-update-interval 12 --snip-lag 2"
    " --snip-wait 120"
)
RECIPE = (
    "--snip --snip-gemm transformer_engine --snip-policy uniform-fp8 --snip-pin *.linear_proj=fp8_tensor"
    " --snip-pin *.linear_fc1:wgrad=bf16"
)
if importlib.util.find_spec("fla") is None:
    del FAMILIES["delta_experts"]
chosen = os.environ.get("SNIP_FAMILIES", ",".join(FAMILIES)).split(",")


class Family:
    """The trainings of one family, in ``folder``, each on ``ranks`` GPUs."""

    def __init__(self, folder: Path, arguments: str, ranks: int = 1) -> None:
        self._folder, self._arguments, self._ranks = folder, arguments, ranks
        self._pins = " --snip-pin *.experts.linear_fc2:dgrad=bf16" if "--num-experts" in arguments else ""
        self.found: dict[str, dict[str, dict[str, str]]] = {}

    def train(self, name: str, snip: str, until: int, *, load: str | None = None, at: int = 0) -> None:
        """Train to a step and save, from the checkpoint of an earlier training at step ``at`` if one is named."""
        run = self._folder / name
        run.mkdir()
        arguments = [*shlex.split(COMMON + self._arguments), *shlex.split(snip), "--train-iters", str(STEPS)]
        arguments += ["--exit-interval", str(until), "--save", str(run / "saved"), "--save-interval", str(FIRST)]
        if load is not None:
            arguments += ["--load", str(self._folder / load / "saved"), "--ckpt-step", str(at)]
        if snip:
            arguments += ["--snip-dir", str(run / "snip")]
        folders = [str(REPOSITORY), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "TRACE": str(run)}
        environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # the entry sets it as the arguments need it
        environment |= {
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "NCCL_ALGO": "Ring",
            "UB_SKIPMC": "1",  # Transformer Engine's user buffers without multicast, which not every machine allows
        }
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self._ranks)]
        began = time.monotonic()
        with (run / "stdout").open("w") as output, (run / "stderr").open("w") as errors:
            done = subprocess.run(
                [*launcher, "-m", "graphed_pretrain", *arguments],
                stdout=output, stderr=errors, check=False, timeout=200, cwd=run, env=environment,
            )  # fmt: skip
        said = f"{run.name}: code {done.returncode} after {time.monotonic() - began:.0f} s"
        if done.returncode != 0:
            failed = (run / "stderr").read_text()
            said += f"\n{self.stdout(name)[-2000:]}\n{failed[max(failed.find('Traceback'), 0) :][:9000]}"  # the cause
        print(said, flush=True)  # at once, with pytest -s
        assert done.returncode == 0, said
        self.found[name] = json.loads((run / "rank0.json").read_text())

    def run(self) -> None:
        """Run what needs nothing first, then what loads it."""
        with ThreadPoolExecutor(2) as pool:
            list(
                pool.map(
                    lambda each: self.train(each[0], each[1], STEPS),
                    [("stock", ""), ("updated", UPDATED), ("recipe", RECIPE + self._pins)],
                )
            )

            def there_and_back() -> None:
                self.train("there", BF16, SECOND, load="stock", at=FIRST)
                self.train("back", "", STEPS, load="there", at=SECOND)

            back = pool.submit(there_and_back)
            pool.submit(self.train, "resumed", UPDATED, STEPS, load="updated", at=SECOND).result()
            back.result()

    def events(self, name: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self._folder / name / "snip" / "events.jsonl").read_text().splitlines()]

    def stdout(self, name: str) -> str:
        return (self._folder / name / "stdout").read_text()


@pytest.fixture(scope="module", params=[name for name in FAMILIES if name in chosen])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    found = Family(tmp_path_factory.mktemp(request.param), FAMILIES[request.param])
    found.run()
    return found


def test_an_all_bf16_map_from_stock_and_back_are_stock_s_bits(family: Family) -> None:
    stock = family.found["stock"]
    for figures in ("losses", "grad_norms"):
        through = family.found["there"][figures] | family.found["back"][figures]
        assert sorted(map(int, through)) == list(range(FIRST + 1, STEPS + 1))
        assert through == {step: stock[figures][step] for step in through}


def trains_nearly_as_stock(family: Family, name: str) -> None:
    stock, mapped = (
        [float.fromhex(each) for each in family.found[name]["losses"].values()] for name in ("stock", name)
    )
    assert len(mapped) == STEPS
    assert stock[-1] < stock[0]
    assert mapped != stock
    assert sum(mapped[-5:]) / sum(stock[-5:]) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("name", ["updated", "recipe"])
def test_maps_train_nearly_as_bf16(name: str, family: Family) -> None:
    trains_nearly_as_stock(family, name)


def test_maps_were_updated(family: Family) -> None:
    assert len([event for event in family.events("updated") if event["event"] == "adopt"]) == 2


def goes_on_bit_for_bit(family: Family, name: str, *, of: str, at: int) -> None:
    whole, part = family.found[of], family.found[name]
    for figures in ("losses", "grad_norms"):
        assert sorted(map(int, part[figures])) == list(range(at + 1, STEPS + 1))
        assert part[figures] == {step: whole[figures][step] for step in part[figures]}


def test_a_run_with_updated_maps_resumes_bit_for_bit(family: Family) -> None:
    goes_on_bit_for_bit(family, "resumed", of="updated", at=SECOND)


def test_every_linear_is_in_reach_of_the_map(family: Family) -> None:
    assert "stays bf16" not in family.stdout("updated")

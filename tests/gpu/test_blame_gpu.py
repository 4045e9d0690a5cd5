"""``--snip-blame`` of jobs of Megatron's own FP8, with Transformer Engine's own linears, through the real entry."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from snip_megatron.precision import Format, LinearId
from snip_megatron.precision.recipes import stage_file

pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)

pytestmark = pytest.mark.usefixtures("hopper")
HIDDEN, FFN = 256, 512
LLAMA = shlex.split(f"""
--num-layers 2 --hidden-size {HIDDEN} --ffn-hidden-size {FFN} --num-attention-heads 4 --seq-length 128
--max-position-embeddings 128 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2
--global-batch-size 4 --bf16 --use-distributed-optimizer --transformer-impl transformer_engine --lr 1e-3 --min-lr 1e-4
--lr-decay-iters 20 --train-iters 20 --seed 1234 --log-interval 1 --num-workers 0 --mock-data
--tokenizer-type NullTokenizer --vocab-size 255 --ckpt-format torch_dist --eval-iters 0 --eval-interval 100
--no-check-for-nan-in-loss-and-grad
""")
EXPERTS = shlex.split("""
--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-grouped-gemm --moe-token-dispatcher-type alltoall
--moe-router-load-balancing-type none
""")


def started(folder: Path, *arguments: str, module: str = "snip_megatron.pretrain_gpt", **env: str) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    process = subprocess.run(
        [*launcher, "-m", module, *LLAMA, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=folder,
        env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"}
        | {"PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), *sys.path)), **env},
    )
    assert process.returncode == 0, (process.stdout + process.stderr)[-4000:]
    return process


def blamed(folder: Path, step: int, *arguments: str, **how: str) -> dict[str, Any]:
    started(folder, *arguments, "--snip-blame", str(step), "--snip-dir", str(folder / "blame"), **how)
    result: dict[str, Any] = json.loads((folder / "blame" / f"blame_{step}.json").read_text())
    print(json.dumps({key: result[key] for key in ("verdict", "reason", "passes", "bug", "seconds")}))
    print({f"{each['linear']}:{each['gemm']}": each["sqnr_of_kernel"] for each in result["harm"]})
    return result


@pytest.mark.parametrize(
    ("recipe", "format", "extra"),
    [
        ("tensorwise", "e4m3", ["--first-last-layers-bf16", "--num-layers-at-end-in-bf16", "0"]),
        ("blockwise", "e4m3", []),
        ("tensorwise", "hybrid", EXPERTS),
    ],
    ids=["first layer in bf16", "blockwise", "experts"],
)
def test_a_healthy_step_is_not_blamed(recipe: str, format: str, extra: list[str], tmp_path: Path) -> None:
    result = blamed(tmp_path, 1, "--fp8-format", format, "--fp8-recipe", recipe, *extra)
    assert (result["job"], result["verdict"]) == ("megatron", "not_precision")
    assert recipe in result["formats"]
    losses = {name: each["loss"] for name, each in result["passes"].items()}
    assert losses["kernels"] == pytest.approx(losses["reference"], abs=2e-3)


def test_delayed_scaling_begins_with_the_history_of_the_checkpoint(tmp_path: Path) -> None:
    job = ["--fp8-format", "hybrid", "--fp8-recipe", "delayed", "--fp8-amax-history-len", "4"]
    job += ["--fp8-amax-compute-algo", "max"]
    started(tmp_path, *job, "--train-iters", "3", "--save", "ckpt", "--save-interval", "3")
    before = sorted(tmp_path.joinpath("ckpt").rglob("*"))
    result = blamed(tmp_path, 4, *job, "--load", "ckpt", "--override-opt-param-scheduler")
    assert (result["job"], result["verdict"]) == ("megatron", "not_precision")
    assert result["checkpoint"]["step"] == 3
    losses = {name: each["loss"] for name, each in result["passes"].items()}
    assert losses["kernels"] == pytest.approx(losses["reference"], abs=2e-3)
    assert sorted(tmp_path.joinpath("ckpt").rglob("*")) == before


def test_a_gemm_that_loses_rows_is_a_bug(tmp_path: Path) -> None:
    job = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"]
    result = blamed(tmp_path, 1, *job, module="blamed_te", FAULT="dgrad", DEPTH=str(FFN))
    assert result["verdict"] == "bug"
    assert (result["bug"]["linear"], result["bug"]["gemm"]) == ("decoder.layers.1.mlp.linear_fc2", "dgrad")
    assert "rows 240-255" in result["bug"]["where"]


def test_the_file_of_a_remedy_leaves_the_culprit_alone_in_bf16(tmp_path: Path) -> None:
    culprit = LinearId.parse("decoder.layers.1.mlp.linear_fc2")
    tmp_path.joinpath("remedy.yaml").write_text(stage_file({culprit: Format.BF16}, 0, range(2), 1))
    job = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise", "--te-precision-config-file", "remedy.yaml"]
    started(tmp_path, *job, "--train-iters", "3", module="blamed_te", COUNTS=str(tmp_path / "counts.json"))
    counts = json.loads(tmp_path.joinpath("counts.json").read_text())
    assert (
        counts[f"{HIDDEN}x{FFN} plain"] == counts[f"{HIDDEN}x{FFN} quantised"] == 6
    )  # two microbatches of three steps
    assert f"{HIDDEN}x{HIDDEN} plain" not in counts


def test_recipes_of_other_cards_are_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="recipe mxfp8 needs a Blackwell GPU"):
        blamed(tmp_path, 1, "--fp8-format", "e4m3", "--fp8-recipe", "mxfp8")

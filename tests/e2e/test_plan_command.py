"""``snip plan`` as a user runs it: tables, JSON, and one line for every mistake."""

import json
import re
import sys
from pathlib import Path

import pytest
from snip_command import refused, snip, snip_alone

from snip_megatron.planner.plan import PLAN_SCHEMA

SEVENTY = ("--model", "llama-70b", "--tp", 8, "--pp", 8)


def test_a_plan_of_70b(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    process = snip_alone("plan", *SEVENTY, "--sequence-parallel", "--budget", "fp4=0.75", "--json", out)
    assert process.returncode == 0, process.stderr
    plan = json.loads(out.read_text())
    assert plan["schema"] == PLAN_SCHEMA
    assert plan["layout"]["gpus"] == 64
    assert len(plan["stages"]) == 8
    assert [(row["n"], row["k"]) for row in plan["linears"]] == [(1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)]
    flops = sum(stage["flops"] for stage in plan["stages"]) * 8
    assert flops == pytest.approx(6 * 80 * 855_638_016 * 8192 * 64)
    assert plan["budget"]["fp4_share"] >= 0.75
    assert plan["steps"]["bf16"]["seconds"] > plan["steps"]["map"]["seconds"]
    assert "70.55 B parameters" in process.stdout
    assert "NVIDIA H200" in process.stdout
    assert re.search(r"planned 0\.75\d* of 0\.75 asked", process.stdout)
    assert "fp8 everywhere beats these maps" in process.stdout


EXPERTS = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 --seq-length 32"
    " --max-position-embeddings 32 --swiglu --disable-bias-linear --bf16 --micro-batch-size 2 --global-batch-size 8"
    " --num-experts 8 --moe-layer-freq 2 --moe-router-topk 2 --moe-ffn-hidden-size 48 --expert-model-parallel-size 2"
    " --pipeline-model-parallel-size 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --lr 1e-4"
    " --train-iters 10 --no-gradient-accumulation-fusion --snip --snip-budget fp4=0.5"
)


def test_the_arguments_of_a_job_on_gpus_are_planned_without_them(tmp_path: Path) -> None:
    """Neither its data and its tokenizer nor Transformer Engine are on the machine that plans. No logger is opened.

    On 4 GPUs in two stages, a layer of experts has 4 of them on each rank, to which 2 ranks send tokens twice.
    """
    arguments = EXPERTS.replace("--mock-data --tokenizer-type NullTokenizer", "--train-data-path no/where")
    arguments = arguments.replace(" --no-gradient-accumulation-fusion", "").replace(" --snip --snip-budget fp4=0.5", "")
    arguments += " --transformer-impl transformer_engine --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion"
    arguments += " --cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router --te-rng-tracker"
    arguments += " --fp8-format hybrid --fp8-recipe tensorwise"  # whose formats are the candidates
    arguments = arguments.replace("--train-iters 10", "--train-samples 80")
    arguments += f" --wandb-project p --wandb-exp-name e --tensorboard-dir {tmp_path / 'board'}"
    out = tmp_path / "plan.json"
    asked = ("--budget", "fp4=0.5", "--timings", "flops")
    process = snip_alone("plan", "--gpus", 4, *asked, "--json", out, "--megatron", *arguments.split())
    assert process.returncode == 0, process.stderr
    plan = json.loads(out.read_text())
    assert plan["layout"]["gradient_accumulation_fusion"]
    assert plan["budget"]["formats"] == ["fp8_tensor", "fp4"]
    assert list(tmp_path.iterdir()) == [out]
    assert (plan["layout"]["ep"], plan["layout"]["dp"], plan["budget"]["asked"]) == (2, 2, "fp4=0.5")
    linears = {row["kind"]: row for row in plan["linears"]}
    experts = linears["mlp.experts.linear_fc1"]
    assert [experts[name] for name in ("gemms", "tokens", "n", "k")] == [4, 32 * 2 * 2 * 2 // 8, 96, 64]
    assert experts["seconds"]["bf16"] == pytest.approx(3 * 2 * 64 * 2 * 96 * 64 / 1e15)
    dense = linears["mlp.linear_fc1"]
    assert [dense[name] for name in ("gemms", "tokens", "n", "k")] == [1, 64, 384, 64]
    assert plan["stages"][0]["seconds"]["bf16"]["experts"] > 0
    assert "4 of 32×96×64" in process.stdout


def test_a_budget_out_of_reach() -> None:
    line = refused("plan", "--model", "8b", "--timings", "flops", "--budget", "speedup=5", code=3)
    assert line.startswith("--budget speedup=5: infeasible: ")
    assert "the highest reachable speedup is 4" in line


def test_a_model_that_does_not_fit_has_an_exit_code_of_its_own() -> None:
    assert snip("plan", "--model", "1b", "--timings", "flops", "--gpu-memory", "1").returncode == 3


def test_a_plan_is_made_without_torch() -> None:
    """Importing torch takes about ten times as long as everything else that a plan imports."""
    code = "import sys; from snip_megatron.tools.cli import main; main(); sys.exit('torch' in sys.modules)"
    process = snip_alone("plan", "--model", "1b", "--dp", 2, command=(sys.executable, "-c", code))
    assert process.returncode == 0, process.stderr[-2000:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: --model, or --megatron with the arguments of a training"),
        (("--model", "1b", "--gpus", 4), "--gpus belongs to --megatron; the GPUs of a --model are those of --tp"),
        (("--model", "7b", "--tp", 3), "--tp 3: llama-7b has 32 heads, which cannot be split over 3 ranks"),
        (("--model", "8b", "--pp", "x"), "argument --pp: 'x' is not a whole number from 1 to 100000000000"),
        (("--model", "8b", "--json", "/nowhere/p.json"), "--json /nowhere/p.json: there is no folder /nowhere"),
    ],
)
def test_refusals(arguments: tuple[object, ...], message: str) -> None:
    assert refused("plan", *arguments).startswith(message)

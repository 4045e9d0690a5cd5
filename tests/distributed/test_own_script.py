"""Scripts that are not ours, with three lines of SNIP: they train as before without ``--snip``, and as ours with it."""

import shlex
from pathlib import Path

from launch import REPOSITORY, losses, tiny_llama_args
from layouts import figures
from warm_ranks import WarmRanks

from benchmarks.quality.warm import weights_sha256
from snip_megatron.megatron.prepare_data import byte_tokenizer, save_tokenizer
from snip_megatron.runtime.run_data import read_events, read_maps, read_metrics

USUAL = REPOSITORY / "examples" / "own_pretrain_gpt.py"
EXAMPLE = REPOSITORY / "examples" / "own_model_data_loss.py"
SNIP = shlex.split("--snip --snip-first-update 2 --snip-update-interval 6 --snip-lag 3 --snip-wait 120")
TP2 = ("--bf16", "--tensor-model-parallel-size", "2")
#: What SNIP's parser sets by itself where there is no CUDA device; a script without SNIP must be told.
ON_CPU = shlex.split(
    "--distributed-backend gloo --transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion"
    " --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion --disable-jit-fuser"
)


def test_without_snip_the_script_trains_bitwise_as_it_did(warm: WarmRanks, tmp_path: Path) -> None:
    def arguments(name: str) -> list[str]:
        saves = ("--save", str(tmp_path / name), "--save-interval", "4")
        return tiny_llama_args(*ON_CPU, *TP2, "--focus", "2", *saves, iters=4)

    env = {"SCRIPT": str(EXAMPLE)}
    warm.succeed(2, arguments("before"), module="altered_pretrain:stripped", env=env, tmp=tmp_path / "b")
    after = warm.succeed(2, arguments("after"), module=f"examples.{EXAMPLE.stem}", tmp=tmp_path / "a")
    assert "iteration        4/       4" in after.stdout
    assert "focused loss" in after.stdout
    trained = [weights_sha256(tmp_path / run / "iter_0000004") for run in ("before", "after")]
    assert trained[0] == trained[1]


def test_the_usual_script_under_snip_is_our_entry(warm: WarmRanks, tmp_path: Path) -> None:
    def arguments(name: str) -> list[str]:
        return tiny_llama_args("--bf16", *SNIP, "--snip-dir", str(tmp_path / name), iters=9)

    whole = {"WHOLE_MOCK_DATA": "1"}
    warm.succeed(1, [*arguments("entry"), "--snip-formats", "mxfp8,nvfp4"], tmp=tmp_path / "e", env=whole)
    recipe = shlex.split("--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag")
    options = [str(USUAL), *arguments("script"), *recipe]  # Megatron's own, which SNIP replaces
    process = warm.succeed(1, options, module="snip_megatron.attach", tmp=tmp_path / "s", env=whole)
    assert process.stdout.count("with recipe mxfp8 left out: SNIP chooses the formats of linears") == 1
    entry, script = tmp_path / "entry", tmp_path / "script"
    assert [event["step"] for event in read_events(script) if event["event"] == "adopt"] == [5]
    assert {step: dict(result.choices) for step, result in read_maps(script).items()} == {
        step: dict(result.choices) for step, result in read_maps(entry).items()
    }
    assert figures(entry) == figures(script)
    assert len(losses(process)) == 9
    assert (script / "report.html").is_file()


def test_own_model_data_and_loss_under_snip(warm: WarmRanks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_tokenizer(byte_tokenizer(), tmp_path / "tokenizer")  # unlike NullTokenizer it leaves --vocab-size empty
    text = ("--mock-data", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path / "tokenizer"))
    extra = ("--focus", "2", "--eval-iters", "1", "--eval-interval", "8", "--pipeline-model-parallel-size", "2")
    arguments = tiny_llama_args(*text, *extra, *SNIP, "--snip-dir", str(run), iters=12, mock_data=False)
    process = warm.succeed(2, arguments, module="altered_pretrain:complaining", tmp=tmp_path, timeout=300)
    (adopted, *_) = [event for event in read_events(run) if event["event"] == "adopt"]
    assert adopted["step"] == 5
    for rank in range(2):
        assert f"rank {rank}: map {adopted['version']} from step 5 on" in process.stdout
    assert process.stdout.count("the user's own fault; training goes on") == 1  # on rank 1 alone
    metrics = read_metrics(run)
    assert all(line["loss"] is not None for line in metrics)  # the loss of another name, on the last of two stages
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert any(line.get("fp4_fraction", 0) >= 0.75 for line in metrics)

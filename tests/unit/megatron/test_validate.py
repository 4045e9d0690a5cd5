"""What cannot work with SNIP is refused at start in one line that names both sides; layouts that cut tiles."""

import json
import re
from pathlib import Path
from typing import Any

import llama_arguments
import pytest
from dense_names import dense_names
from llama_arguments import DEFAULTS, EXPERTS, arguments, check, linears, megatron_parser, refused
from megatron.core.transformer.enums import CudaGraphModule

from snip_megatron.megatron import validate
from snip_megatron.megatron.blame import prepare_blame
from snip_megatron.megatron.validate import CONFLICTS, cut_tiles
from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.config import SnipConfig

CONTEXT = {"transformer_impl": "transformer_engine"}


def config(**fields: Any) -> SnipConfig:
    return SnipConfig(enabled=True, **fields)


# -- Megatron's arguments --------------------------------------------------------------------------------------
GRAPHS = {name: {"cuda_graph_impl": name} for name in ("local", "transformer_engine", "full_iteration")}
MODULES = {"cuda_graph_modules": [CudaGraphModule.attn, CudaGraphModule.moe_router, CudaGraphModule.moe_preprocess]}
FULLY_SHARDED = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
SCATTERS = {"use_distributed_optimizer": True, "data_parallel_size": 2}
LOW = {"accumulate_allreduce_grads_in_fp32": False}
TP, PP, CP = ({f"{kind}_size": 2} for kind in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel"))
FP8 = {"gradient_reduction": "fp8"}
OVERLAPPED, TE_GEMMS = {"tp_comm_overlap": True}, {"gemm": "transformer_engine"}
NOISE = {"estimator": "noise"}
FISHER, RULE, FIRST = {"estimator": "fisher"}, {"policy": "backward-first"}, {"first_update": 0}


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate.torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("options", "snip"),
    [
        (FULLY_SHARDED, {}),
        ({"use_torch_fsdp2": True}, {}),
        *((graphs, {}) for graphs in GRAPHS.values()),
        (EXPERTS | GRAPHS["transformer_engine"] | MODULES, {}),
        (CP | CONTEXT, {}),
        ({"defer_embedding_wgrad_compute": True} | CONTEXT, {}),
        (OVERLAPPED | CONTEXT, {}),
        (SCATTERS, FP8),
        (SCATTERS | {"data_parallel_size": 1} | CP | CONTEXT, FP8),
        (SCATTERS | TP | {"sequence_parallel": True, "position_embedding_type": "rope"}, FP8),
        (LOW | {"grad_reduce_in_bf16": True}, {}),
        *(({"optimizer": name}, {}) for name in ("adam", "sgd", "lion", "muon", "dist_muon")),
        *(({"optimizer": "soap"}, snip) for snip in (FISHER, RULE)),
        ({"optimizer": "adam", "use_distributed_optimizer": True}, {}),
        *(({"optimizer": name, "use_layer_wise_distributed_optimizer": True}, {}) for name in ("lion", "muon")),
        ({"load": "checkpoints"}, FIRST),
        ({}, FIRST | FISHER),
    ],
    ids=str,
)
def test_what_goes_together(options: dict[str, Any], snip: dict[str, Any]) -> None:
    check(config(**snip), arguments(**options))


FSDP = "--use-megatron-fsdp cannot be combined with "
LOCAL, WHOLE = (
    "--cuda-graph-impl local cannot be combined with ",
    "--cuda-graph-impl full_iteration cannot be combined ",
)
OF_FP8 = "--snip-gradient-reduction fp8"


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("options", "snip", "start", "words"),
    [
        (FULLY_SHARDED | {"data_parallel_sharding_strategy": "optim"}, {},
         f"{FSDP}--data-parallel-sharding-strategy optim under --snip; use", "use --use-distributed-optimizer alone"),
        (FULLY_SHARDED | PP, {}, f"{FSDP}--pipeline-model-parallel-size 2 under --snip; use 1", ""),
        (FULLY_SHARDED, TE_GEMMS, f"{FSDP}--snip-gemm transformer_engine under --snip; use --snip-gemm hopper", ""),
        ({"use_torch_fsdp2": True, "ckpt_format": "torch_dcp"}, {},
         "--use-torch-fsdp2 cannot be combined with --ckpt-format torch_dcp under --snip; use torch", ""),
        (EXPERTS | GRAPHS["full_iteration"], {}, WHOLE, "--num-experts 4 under --snip: the host counts"),
        (EXPERTS | GRAPHS["local"] | {"cuda_graph_modules": [CudaGraphModule.moe]}, {},
         LOCAL, "--cuda-graph-modules attn moe_router"),
        (EXPERTS | GRAPHS["local"] | MODULES, {}, LOCAL, "use --cuda-graph-impl transformer_engine"),
        (GRAPHS["full_iteration"] | {"rampup_batch_size": [8, 8, 64]}, {}, WHOLE, "--rampup-batch-size"),
        (GRAPHS["full_iteration"] | PP, {},
         WHOLE, "--pipeline-model-parallel-size 2 under --snip: Megatron waits for the device"),
        (GRAPHS["local"] | PP, {},
         LOCAL, "--pipeline-model-parallel-size 2 under --snip: Megatron cannot free the output"),
        (CP | {"transformer_impl": "local"}, {},
         "--context-parallel-size 2 cannot be combined with --transformer-impl local: ", ""),
        ({"defer_embedding_wgrad_compute": True, "transformer_impl": "local"}, {},
         "--defer-embedding-wgrad-compute cannot be combined with --transformer-impl local: ", ""),
        (OVERLAPPED | CONTEXT, TE_GEMMS, "--tp-comm-overlap cannot be combined with", ""),
        (SCATTERS | {"use_distributed_optimizer": False}, FP8,
         f"{OF_FP8}: only the distributed optimizer scatters gradients; add", ""),
        (SCATTERS | TP, FP8, f"{OF_FP8} with --tensor-model-parallel-size 2: add --sequence-parallel;", ""),
        (SCATTERS | TP | {"sequence_parallel": True, "position_embedding_type": "learned_absolute"}, FP8,
         f"{OF_FP8} with --tensor-model-parallel-size 2 cannot be combined with --position-embedding-type learned", ""),
        ({"optimizer": "muon"}, NOISE, "--optimizer muon cannot be combined with --snip-estimator noise",
         "knows the update of adam alone"),
        ({"optimizer": "sgd", "use_distributed_optimizer": True}, FISHER,
         "--optimizer sgd cannot be combined with --use-distributed-optimizer", ""),
        # Megatron's own validation turns the distributed optimizer into the layer-wise one.
        ({"optimizer": "muon", "use_layer_wise_distributed_optimizer": True, "bf16": False}, {},
         "--optimizer muon with --use-distributed-optimizer needs --bf16", ""),
        ({}, FIRST | NOISE, "", "--snip-first-update 0"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not(options: dict[str, Any], snip: dict[str, Any], start: str, words: str) -> None:
    result = refused(config(**snip), arguments(**options))
    assert result.startswith(start)
    assert words in result


def test_cuda_graphs_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate.torch.cuda, "is_available", lambda: False)
    result = refused(config(), arguments(**GRAPHS["transformer_engine"]))
    assert result.startswith("--cuda-graph-impl transformer_engine needs a CUDA device")


# -- maps ------------------------------------------------------------------------------------------------------
def write_map(path: Path, layers: int) -> str:
    path.write_text(PrecisionMap.uniform(dense_names(layers), Format.FP8).to_json())
    return str(path)


def test_static_maps(tmp_path: Path) -> None:
    check(config(map=write_map(tmp_path / "fits.json", 4)), arguments())
    other = write_map(tmp_path / "other.json", 5)
    message = refused(config(map=other), arguments())
    assert message.startswith(f"--snip-map {other}: names decoder.layers.4.")
    assert "map of another model" in message

    for path in (str(tmp_path / "absent.json"), str(tmp_path)):
        assert refused(config(map=path), arguments()).startswith(f"--snip-map {path}: cannot be read")


def recorded(run: Path, layers: int) -> SnipConfig:
    """A run directory that adopted a map before step 7."""
    (run / "maps").mkdir(parents=True)
    write_map(run / "maps" / "step_7.json", layers)
    event = {"time": 0.0, "step": 7, "event": "adopt", "version": 1}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    return config(replay=str(run))


def test_replayed_maps(tmp_path: Path) -> None:
    check(recorded(tmp_path / "fits", 4), arguments())
    message = refused(recorded(tmp_path / "other", 3), arguments())
    assert message.startswith(f"--snip-replay {tmp_path / 'other' / 'maps' / 'step_7.json'}: says nothing about")
    missing = recorded(tmp_path / "missing", 4)
    (tmp_path / "missing" / "maps" / "step_7.json").unlink()
    assert "step_7.json is missing" in refused(missing, arguments())
    (tmp_path / "empty").mkdir()
    for name in ("absent", "empty"):
        message = refused(config(replay=str(tmp_path / name)), arguments())
        assert message.startswith(f"--snip-replay {tmp_path / name}: no adopted map is recorded there")


# -- pins ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["snip", "uniform-fp4"])
def test_a_pin_that_matches_nothing(policy: str) -> None:
    message = refused(config(policy=policy, pin=("*.linear_fc3=bf16",)), arguments())
    assert message.startswith("--snip-pin *.linear_fc3=bf16: matches no option")


def test_pins_and_formats_that_leave_the_budget_out_of_reach() -> None:
    """fc1 is 192×64 of 192×64 + 64×96 + 128×64 + 64×64 a layer: 0.4 of the FLOPs."""
    message = refused(config(pin=("*.linear_fc1=bf16",)), arguments())
    assert message.startswith("--snip-budget fp4=0.75 is unreachable with --snip-formats fp8,fp4, the pins and")
    assert "the highest reachable target is 0.6" in message
    check(config(pin=("*.linear_fc1=bf16",), budget="fp4=0.6"), arguments())
    message = refused(config(formats=("mxfp8", "nvfp4_46")), arguments())  # nvfp4_46 is a format of fprop
    assert message.startswith("--snip-budget fp4=0.75 is unreachable with --snip-formats mxfp8,nvfp4_46, the pins and")


def test_layers_that_megatron_keeps_in_bf16_are_pins_and_the_users_come_after() -> None:
    args = arguments(first_last_layers_bf16=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2)
    assert validate.pins(config(pin=("*.3.*=fp8",)), args) == (
        ("decoder.layers.0.*", "bf16"),
        ("decoder.layers.2.*", "bf16"),
        ("decoder.layers.3.*", "bf16"),
        ("*.3.*", "fp8"),
    )
    assert validate.pins(config(pin=("*=fp8",)), arguments()) == (("*", "fp8"),)
    assert "the highest reachable target is 0.25" in refused(config(), args)


# -- mixtures of experts ---------------------------------------------------------------------------------------
def test_routed_and_shared_experts_are_candidates() -> None:
    """Local layers have one linear for each expert, with --moe-grouped-gemm too."""
    args = arguments(**EXPERTS, pipeline_model_parallel_size=2, moe_grouped_gemm=True)
    assert validate.solve_request(config(), args, linears(args)).unquantised_stage_flops is None
    check(config(budget="fp4=0.95"), args)
    of_engine = {"transformer_impl": "transformer_engine", "context_parallel_size": 2, "moe_router_fusion": True}
    check(config(), arguments(**{**EXPERTS, **of_engine}))
    check(config(budget="loss=0.01", timings="flops"), arguments(**EXPERTS, data_parallel_size=1, micro_batch_size=2))


# -- maps over time ------------------------------------------------------------------------------------------------
def test_pins_that_leave_the_budget_of_a_phase_out_of_reach(tmp_path: Path) -> None:
    """Every update would be infeasible, and the whole run in bf16."""
    path = tmp_path / "phases.json"
    phases: list[dict[str, Any]] = [{"from": 0.0, "budget": "fp4=0.6"}, {"from": 0.5, "budget": "fp4=0.7"}]
    path.write_text(json.dumps({"schema": "snip.schedule/1", "phases": phases}))
    fields = {"schedule": str(path), "budget": "fp4=0.5"}
    check(config(**fields), arguments())
    message = refused(config(**fields, pin=("*.linear_fc1=bf16",)), arguments())
    assert message.startswith("--snip-schedule: phases[1].budget: fp4=0.7 is unreachable with --snip-formats fp8,fp4,")


def test_globs_of_a_schedule_are_checked_before_training(tmp_path: Path) -> None:
    path = tmp_path / "late.json"
    phases = [{"from": 0}, {"from": 0.9, "change": ["*:fprop"]}]
    path.write_text(json.dumps({"schema": "snip.schedule/1", "phases": phases}))
    check(config(schedule=str(path)), arguments())
    path.write_text(path.read_text().replace("*:fprop", "*:forward"))
    message = refused(config(schedule=str(path)), arguments())
    assert message.startswith("--snip-schedule: phases[1].change: *:forward matches no option")


# A value that conflicts, where it is not True.
VALUES: dict[str, Any] = {
    "gtp_weight_remat_size": 2,
    "expert_gtp_weight_remat_size": 2,
    "mlp_chunks_for_training": 2,
    "non_persistent_ckpt_type": "local",
}
# Arguments that exist only with an optional library.
OPTIONAL = {"--kitchen-config-file", "--use-kitchen"}
DERIVED = {flag for flag in CONFLICTS if flag.endswith("-num-weight-shards")} | {"--non-persistent-ckpt-type local"}
"""Arguments whose message has no value: Megatron computes it, or the entry names it."""


@pytest.mark.parametrize("argument", CONFLICTS)
def test_each_conflict_names_both_sides_and_is_an_argument_of_this_megatron(argument: str) -> None:
    """A renamed argument or attribute would make the check pass in silence."""
    attribute, present, _ = CONFLICTS[argument]
    value = VALUES.get(attribute, True)
    message = refused(SnipConfig(enabled=True), arguments(**{attribute: value}))
    shown = "" if value is True or argument in DERIVED else f" {value}"
    assert message.startswith(f"{argument}{shown} cannot be combined with --snip: ")
    dests = {flag: action.dest for action in megatron_parser()._actions for flag in action.option_strings}
    flag = argument.partition(" ")[0]
    assert (flag in dests) == (argument not in OPTIONAL)
    assert dests.get(flag, attribute) == attribute or attribute.endswith(
        "gtp_weight_remat_size"
    )  # which Megatron computes
    assert not present(DEFAULTS.get(attribute))


def test_the_page_lists_each_of_them() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text(encoding="utf-8")
    listed = [
        flag for row in page.splitlines() if row.startswith("| `--snip`: ") for flag in re.findall("`(--.*?)`", row)
    ]
    assert sorted(set(listed) - {"--snip"}) == sorted(CONFLICTS)


CUT_SIZES: dict[str, Any] = {
    "hidden_size": 1024, "num_attention_heads": 16, "num_query_groups": 4, "kv_channels": 64, "ffn_hidden_size": 1536,
    "seq_length": 256, "micro_batch_size": 1,
}  # fmt: skip
MIXTURE: dict[str, Any] = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 384}


@pytest.mark.parametrize(
    ("tp", "options", "cut"),
    [
        (1, {"ffn_hidden_size": 100}, []),  # one shard is what every other layout is held against
        (2, {}, []),
        (1, {"context_parallel_size": 2}, ["tokens of a microbatch's pieces 128 / 2 ranks = 64"]),
        (4, {"seq_length": 512, "context_parallel_size": 2, "sequence_parallel": True},
         ["tokens of a microbatch 512 / 8 ranks = 64"]),
        (2, {"ffn_hidden_size": 1408}, ["columns of mlp.linear_fc2 1408 / 2 ranks = 704"]),
        (4, {"kv_channels": 32}, ["rows of self_attention.linear_qkv 768 / 4 ranks = 192"]),
        (2, MIXTURE | {"expert_tensor_parallel_size": 2}, ["columns of mlp.experts.linear_fc2 384 / 2 ranks = 192"]),
    ],
)  # fmt: skip
def test_what_is_cut(tp: int, options: dict[str, Any], cut: list[str]) -> None:
    args = llama_arguments.arguments(**CUT_SIZES | {"tensor_model_parallel_size": tp} | options)
    assert cut_tiles(args, linears(args)) == cut


def test_a_pattern_of_layers_of_experts_fits_the_decoder() -> None:
    args = arguments(**EXPERTS)
    validate.check_layers_of_experts(args)
    for pattern, words in ((0, "--moe-layer-freq 0: give 1 or more"), ([0, 1], "names 2 layers, the decoder has 4")):
        args.moe_layer_freq = pattern
        with pytest.raises(SnipError, match=words):
            validate.check_layers_of_experts(args)


def test_a_blame_refuses_sharded_weights_and_growing_batches() -> None:
    for options, words in ((FULLY_SHARDED, "--use-megatron-fsdp"), ({"rampup_batch_size": [4, 4, 64]}, "--rampup")):
        with pytest.raises(SnipError, match=f"--snip-blame cannot be combined with {words}"):
            prepare_blame(config(blame="1"), arguments(load=None, **options))


def test_a_blame_of_a_step_behind_the_jobs_last_is_refused() -> None:
    with pytest.raises(SnipError, match="--snip-blame 31: the job ends at iteration 30; give --train-iters 31 or more"):
        prepare_blame(config(blame="30,31"), arguments(load=None, train_iters=30))

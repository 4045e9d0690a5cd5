"""What cannot work with SNIP is refused at start in one line that names both sides."""

import json
from pathlib import Path
from typing import Any

import pytest
from llama_arguments import EXPERTS, arguments, linears
from megatron.core.transformer.enums import CudaGraphModule
from refusals import check, refused

from snip_megatron.config import SnipConfig
from snip_megatron.errors import SnipError
from snip_megatron.megatron import validate
from snip_megatron.precision import (
    Format,
    PrecisionMap,
    dense_names,
)

CONTEXT = {"transformer_impl": "transformer_engine"}


def config(**fields: Any) -> SnipConfig:
    return SnipConfig(enabled=True, **fields)


def test_a_plain_run_is_accepted() -> None:
    check(config(), arguments())
    check(config(policy="uniform-fp4", pin=("*.0.*=bf16",)), arguments(bf16=False))


# -- Megatron's arguments --------------------------------------------------------------------------------------
FULLY_SHARDED = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}


@pytest.mark.parametrize(
    ("given", "snip", "message"),
    [
        ({"data_parallel_sharding_strategy": "optim"}, {}, "--data-parallel-sharding-strategy optim under --snip; use"),
        ({"num_distributed_optimizer_instances": 2}, {}, "--num-distributed-optimizer-instances 2 under --snip; use 1"),
        ({"pipeline_model_parallel_size": 2}, {}, "--pipeline-model-parallel-size 2 under --snip; use 1"),
        ({"delay_wgrad_compute": True}, {}, "--delay-wgrad-compute under --snip; leave it out"),
        ({}, {"gemm": "transformer_engine"}, "--snip-gemm transformer_engine under --snip; use --snip-gemm auto"),
    ],
    ids=str,
)
def test_what_megatron_fsdp_does_not_go_with(given: dict[str, Any], snip: dict[str, Any], message: str) -> None:
    found = refused(config(**snip), arguments(**FULLY_SHARDED | given))
    assert found.startswith(f"--use-megatron-fsdp cannot be combined with {message}")
    assert found.endswith(", or use --use-distributed-optimizer alone")


def test_full_sharding_is_accepted() -> None:
    check(config(), arguments(**FULLY_SHARDED))
    check(config(), arguments(use_torch_fsdp2=True))
    found = refused(config(), arguments(use_torch_fsdp2=True, ckpt_format="torch_dcp"))
    assert found.startswith("--use-torch-fsdp2 cannot be combined with --ckpt-format torch_dcp under --snip; use torch")


def test_megatron_fsdp_scales_experts_again_where_one_rank_holds_each() -> None:
    ranks = {"data_parallel_size": 4, "micro_batch_size": 1, "expert_model_parallel_size": 4}
    whole = FULLY_SHARDED | EXPERTS | ranks
    assert validate.scales_experts_again(arguments(**whole))
    for otherwise in (
        {"use_megatron_fsdp": False},
        {"expert_model_parallel_size": 2},
        {"global_batch_size": 4},
        {"calculate_per_token_loss": True},
    ):
        assert not validate.scales_experts_again(arguments(**whole | otherwise)), otherwise


@pytest.mark.parametrize(
    ("given", "snip", "message"),
    [
        (EXPERTS | {"cuda_graph_impl": "full_iteration"}, {}, "--num-experts 4 under --snip: the host counts"),
        ({"cuda_graph_impl": "transformer_engine", "delay_wgrad_compute": True}, {}, "--delay-wgrad-compute under"),
        (EXPERTS, {}, "--num-experts 4 under --snip: the host counts"),
        (EXPERTS | {"cuda_graph_modules": [CudaGraphModule.moe]}, {}, "--cuda-graph-modules attn moe_router"),
        ({"cuda_graph_impl": "full_iteration", "cuda_graph_warmup_steps": 0}, {}, "--cuda-graph-warmup-steps 0"),
        ({"cuda_graph_impl": "full_iteration", "rampup_batch_size": [8, 8, 64]}, {}, "--rampup-batch-size"),
        (
            {"cuda_graph_impl": "full_iteration", "step_batch_size_schedule": "0:8 1M:16"},
            {},
            "--step-batch-size-schedule: the graph holds",
        ),
        (
            {"cuda_graph_impl": "full_iteration", "pipeline_model_parallel_size": 2},
            {},
            "--pipeline-model-parallel-size 2 under --snip: Megatron waits for the device",
        ),
        (
            {"pipeline_model_parallel_size": 2},
            {},
            "--pipeline-model-parallel-size 2 under --snip: Megatron cannot free the output",
        ),
    ],
    ids=str,
)
def test_what_cuda_graphs_do_not_work_with(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], snip: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(validate.torch.cuda, "is_available", lambda: True)
    found = refused(config(**snip), arguments(**{"cuda_graph_impl": "local"} | given))
    assert found.startswith(f"--cuda-graph-impl {given.get('cuda_graph_impl', 'local')} cannot be combined with ")
    assert message in found
    check(config(), arguments(cuda_graph_impl=given.get("cuda_graph_impl", "local")))


def test_cuda_graphs_beside_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate.torch.cuda, "is_available", lambda: True)
    modules = [CudaGraphModule.attn, CudaGraphModule.moe_router, CudaGraphModule.moe_preprocess]
    check(config(), arguments(**EXPERTS, cuda_graph_impl="transformer_engine", cuda_graph_modules=modules))
    local = arguments(**EXPERTS, cuda_graph_impl="local", cuda_graph_modules=modules)
    assert "use --cuda-graph-impl transformer_engine" in refused(config(), local)


def test_cuda_graphs_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate.torch.cuda, "is_available", lambda: False)
    graphs = arguments(cuda_graph_impl="transformer_engine")
    assert refused(config(), graphs).startswith("--cuda-graph-impl transformer_engine needs a CUDA device")
    monkeypatch.setattr(validate.torch.cuda, "is_available", lambda: True)
    check(config(), graphs)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"context_parallel_size": 2}, "--context-parallel-size 2"),
        ({"defer_embedding_wgrad_compute": True}, "--defer-embedding-wgrad-compute"),
    ],
)
def test_what_needs_the_layers_of_transformer_engine(given: dict[str, Any], message: str) -> None:
    check(config(), arguments(**given, transformer_impl="transformer_engine"))
    found = refused(config(), arguments(**given, transformer_impl="local"))
    assert found.startswith(f"{message} cannot be combined with --transformer-impl local: ")


def test_overlapped_gathers_are_of_bf16() -> None:
    overlap = arguments(tp_comm_overlap=True, transformer_impl="transformer_engine")
    check(config(), overlap)
    assert refused(config(gemm="transformer_engine"), overlap).startswith("--tp-comm-overlap cannot be combined with")


def test_quantised_gathers_need_a_layout_that_gathers() -> None:
    snip = config(communication="gather")
    assert refused(snip, arguments()).startswith("--snip-communication gather: linears gather nothing without")
    gathers = {"sequence_parallel": True, "tensor_model_parallel_size": 2, "seq_length": 256, "micro_batch_size": 1}
    check(snip, arguments(**gathers))
    assert "no multiple of 128" in refused(snip, arguments(**gathers | {"seq_length": 128}))
    assert refused(config(communication="all"), arguments()).startswith("--snip-communication all: ")
    check(config(communication="all"), arguments(**gathers))


def test_gradients_in_fp8_need_a_reduce_scatter_of_megatrons() -> None:
    snip = config(gradient_reduction="fp8")
    scatters = {"use_distributed_optimizer": True, "data_parallel_size": 2}
    check(snip, arguments(**scatters))
    check(snip, arguments(**scatters | {"data_parallel_size": 1, "context_parallel_size": 2} | CONTEXT))
    here = "--snip-gradient-reduction fp8"
    for given, message in (
        ({"use_distributed_optimizer": False}, ": only the distributed optimizer scatters gradients; add"),
        ({"use_layer_wise_distributed_optimizer": True}, ": only the distributed optimizer scatters gradients"),
        ({"ddp_average_in_collective": True}, " cannot be combined with --ddp-average-in-collective"),
        ({"data_parallel_size": 1}, ": there is one data parallel rank"),
        ({"tensor_model_parallel_size": 2}, " with --tensor-model-parallel-size 2: add --sequence-parallel;"),
        (
            {"tensor_model_parallel_size": 2, "sequence_parallel": True, "position_embedding_type": "learned_absolute"},
            " with --tensor-model-parallel-size 2 cannot be combined with --position-embedding-type learned_absolute:",
        ),
    ):
        assert refused(snip, arguments(**scatters | given)).startswith(here + message)
    replicated = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "position_embedding_type": "rope"}
    check(snip, arguments(**scatters | replicated))
    bridge = arguments(**scatters)
    del bridge.ddp_reduce_scatter_with_fp32_accumulation
    assert refused(snip, bridge).startswith(f"{here}: needs Megatron's own training loop with its --ddp-reduce-scatter")


def test_bf16_gradients() -> None:
    low = {"accumulate_allreduce_grads_in_fp32": False}
    check(config(), arguments(**low, grad_reduce_in_bf16=True))
    snip = config(gradient_reduction="fp8")
    scatters = {"use_distributed_optimizer": True, "data_parallel_size": 2}
    assert refused(snip, arguments(**low, **scatters, grad_reduce_in_bf16=True)).startswith(
        "--grad-reduce-in-bf16 cannot be combined with --snip-gradient-reduction fp8"
    )
    message = refused(config(truth=True), arguments(**low, main_grads_dtype="bf16"))
    assert message.startswith("gradients in 16 bits: the oracle")


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "lion", "muon", "dist_muon"])
def test_optimizers_whose_update_is_known(optimizer: str) -> None:
    check(config(), arguments(optimizer=optimizer))


@pytest.mark.parametrize("optimizer", ["soap", "adaptive_muon"])
def test_optimizers_whose_update_is_not_known(optimizer: str) -> None:
    message = refused(config(), arguments(optimizer=optimizer))
    assert message.startswith(f"--optimizer {optimizer} cannot be combined with --snip-estimator noise")
    assert "knows the updates of adam, sgd, lion, muon" in message
    check(config(estimator="fisher"), arguments(optimizer=optimizer))
    check(config(policy="backward-first"), arguments(optimizer=optimizer))


def test_optimizers_of_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate.compat, "has_package", lambda: False)
    for optimizer in ("lion", "muon"):
        message = refused(config(estimator="fisher"), arguments(optimizer=optimizer))
        assert message == (f"--optimizer {optimizer} needs a package that is not here: pip install emerging-optimizers")
    check(config(), arguments(optimizer="sgd"))


def test_optimizers_that_megatron_cannot_share_out() -> None:
    sharded = refused(config(estimator="fisher"), arguments(optimizer="sgd", use_distributed_optimizer=True))
    assert sharded.startswith("--optimizer sgd cannot be combined with --use-distributed-optimizer")
    check(config(), arguments(optimizer="adam", use_distributed_optimizer=True))
    # Megatron's own validation turns the one into the other.
    for optimizer in ("lion", "muon"):
        whole = {"optimizer": optimizer, "use_layer_wise_distributed_optimizer": True}
        assert refused(config(), arguments(**whole, bf16=False)).startswith(
            f"--optimizer {optimizer} with --use-distributed-optimizer needs --bf16"
        )
        check(config(), arguments(**whole))


def test_a_probe_before_the_first_optimizer_step() -> None:
    assert "--snip-first-update 0" in refused(config(first_update=0), arguments())
    check(config(first_update=0), arguments(load="checkpoints"))
    check(config(first_update=0, estimator="fisher"), arguments())


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

    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert refused(config(map=str(broken)), arguments()).startswith(f"--snip-map {broken}: not JSON")
    broken.write_bytes(b"\xff\xfe")
    assert refused(config(map=str(broken)), arguments()).startswith(f"--snip-map {broken}: not a JSON object")
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


def test_pins_that_leave_the_budget_out_of_reach() -> None:
    """fc1 is 192×64 of 192×64 + 64×96 + 128×64 + 64×64 a layer: 0.4 of the FLOPs."""
    message = refused(config(pin=("*.linear_fc1=bf16",)), arguments())
    assert message.startswith("--snip-budget fp4=0.75 is out of reach with --snip-pin: at most fp4=0.6000")
    check(config(pin=("*.linear_fc1=bf16",), budget="fp4=0.6"), arguments())


def test_formats_that_leave_the_budget_out_of_reach() -> None:
    """nvfp4_46 is a format of fprop, a third of the FLOPs, with and without pins."""
    for pin in ((), ("*.0.*=mxfp8",)):
        message = refused(config(formats=("mxfp8", "nvfp4_46"), pin=pin), arguments())
        assert message.startswith("--snip-budget fp4=0.75 is out of reach with --snip-formats mxfp8,nvfp4_46: at most")
        assert message.endswith("lower the budget or add four-bit formats of more GEMMs")


def test_layers_that_megatron_keeps_in_bf16_are_pins_and_the_users_come_after() -> None:
    args = arguments(first_last_layers_bf16=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2)
    assert validate.pins(config(pin=("*.3.*=fp8",)), args) == (
        ("decoder.layers.0.*", "bf16"),
        ("decoder.layers.2.*", "bf16"),
        ("decoder.layers.3.*", "bf16"),
        ("*.3.*", "fp8"),
    )
    assert validate.pins(config(pin=("*=fp8",)), arguments()) == (("*", "fp8"),)
    assert "is out of reach with --first-last-layers-bf16: at most fp4=0.2500" in refused(config(), args)


# -- mixtures of experts ---------------------------------------------------------------------------------------


def test_shared_experts_are_candidates() -> None:
    args = arguments(**EXPERTS, pipeline_model_parallel_size=2)
    assert linears(args).left_flops == {}
    assert validate.solve_request(config(), args, linears(args)).unquantised_stage_flops is None
    check(config(budget="fp4=0.95"), args)


def test_a_pattern_of_layers_of_experts_fits_the_decoder() -> None:
    args = arguments(**EXPERTS)
    validate.check_layers_of_experts(args)
    for pattern, words in ((0, "--moe-layer-freq 0: give 1 or more"), ([0, 1], "names 2 layers, the decoder has 4")):
        args.moe_layer_freq = pattern
        with pytest.raises(SnipError, match=words):
            validate.check_layers_of_experts(args)


@pytest.mark.parametrize("grouped", [False, True])
def test_routed_experts_are_candidates(grouped: bool) -> None:
    """Local layers have one linear for each expert, with --moe-grouped-gemm too."""
    routed = {**EXPERTS, "moe_shared_expert_intermediate_size": None, "moe_grouped_gemm": grouped}
    args = arguments(**routed)
    assert linears(args).left_flops == {}
    assert linears(args).flops["decoder.layers.1.mlp.experts.linear_fc1"] == 2.0 * 96 * 64 * 2
    check(config(), args)  # the default budget is within reach
    of_engine = {"transformer_impl": "transformer_engine", "context_parallel_size": 2, "moe_router_fusion": True}
    check(config(), arguments(**{**routed, **of_engine}))
    single = arguments(**routed, data_parallel_size=1, micro_batch_size=2)
    check(config(budget="loss=0.01", cost="flops"), single)


# -- maps over time ------------------------------------------------------------------------------------------------
def test_pins_that_leave_the_budget_of_a_phase_out_of_reach(tmp_path: Path) -> None:
    """Every update would be infeasible, and the whole run in bf16."""
    path = tmp_path / "phases.json"
    phases: list[dict[str, Any]] = [{"from": 0.0, "budget": "fp4=0.6"}, {"from": 0.5, "budget": "fp4=0.7"}]
    path.write_text(json.dumps({"schema": "snip.schedule/1", "phases": phases}))
    fields = {"schedule": str(path), "budget": "fp4=0.5"}
    check(config(**fields), arguments())
    message = refused(config(**fields, pin=("*.linear_fc1=bf16",)), arguments())
    assert message.startswith(
        "--snip-schedule: phases[1].budget: fp4=0.7 is out of reach with --snip-pin: at most fp4=0.6000"
    )


def test_globs_of_a_schedule_are_checked_before_training(tmp_path: Path) -> None:
    path = tmp_path / "late.json"
    phases = [{"from": 0}, {"from": 0.9, "change": ["*:fprop"]}]
    path.write_text(json.dumps({"schema": "snip.schedule/1", "phases": phases}))
    check(config(schedule=str(path)), arguments())
    path.write_text(path.read_text().replace("*:fprop", "*:forward"))
    message = refused(config(schedule=str(path)), arguments())
    assert message.startswith("--snip-schedule: phases[1].change: *:forward matches no option")


def test_an_average_that_a_late_policy_cannot_reach_is_refused_before_training() -> None:
    check(config(policy="late-forward", budget="fp4=0.9"), arguments())
    message = refused(config(policy="late-forward", budget="fp4=0.9", pin=("*:wgrad=fp8",)), arguments())
    assert message.startswith("--snip-policy late-forward reaches an average fp4 share of 0.6666 at most")

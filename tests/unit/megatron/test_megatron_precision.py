"""Megatron's own FP8 and FP4 beside ``--snip``: what is switched off, and which formats their recipes stand for."""

import argparse
import shlex

import pytest
from llama_arguments import DEFAULTS, megatron_parser

from snip_megatron.megatron.compat import let_snip_choose, separate_experts
from snip_megatron.numerics.products.host_recipe import HostRecipe
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.config import add_arguments, resolve_arguments

OFF = ("fp8", "fp4", "fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag")


@pytest.mark.parametrize(
    ("options", "backend", "formats"),
    [
        ("--fp8-format hybrid --fp8-param-gather", "hopper", ("bf16", "fp8_tensor")),
        ("--fp8-format hybrid --fp8-recipe tensorwise", None, ("fp8_tensor", "fp4")),
        ("--fp8-format e4m3 --fp8-recipe blockwise --snip-budget speedup=1.2", "hopper", ("bf16", "fp8")),
        ("--fp8-format e4m3 --fp8-recipe mxfp8 --reuse-grad-buf-for-mxfp8-param-ag", "blackwell", ("bf16", "mxfp8")),
        ("--fp4-format e2m1 --fp4-recipe nvfp4 --fp4-param-gather", "blackwell", ("bf16", "mxfp8", "nvfp4")),
        ("--fp4-format e2m1 --snip-budget fp4=0.5", "blackwell", ("mxfp8", "nvfp4")),
        ("--fp8-format hybrid --moe-router-padding-for-quantization --snip-formats fp8,fp4", None, ("fp8", "fp4")),
        ("--use-transformer-engine-op-fuser", None, ("fp8", "fp4")),
        ("--fp8-format e4m3 --fp8-recipe custom", "hopper", ("bf16", "fp8", "fp8_tensor")),
        ("", None, ("fp8", "fp4")),
    ],
)
def test_the_recipe_names_the_candidates(
    options: str, backend: str | None, formats: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = let_snip_choose(add_arguments(megatron_parser()))
    args = parser.parse_args(["--snip", *shlex.split(options)])
    assert {name: getattr(args, name) for name in OFF} == {name: DEFAULTS[name] for name in OFF}
    assert resolve_arguments(args, backend).formats == formats
    said = capsys.readouterr().out
    assert said.count("left out: SNIP chooses the formats of linears") == (1 if options else 0)
    assert all(word in said for word in shlex.split(options) if word.startswith("--fp") and "recipe" not in word)


SINGLE = ("moe_single_grouped_weight", "moe_single_grouped_bias")


@pytest.mark.skipif("moe_use_grouped_tensor" not in DEFAULTS, reason="Megatron 0.19 has them in its op fuser only")
@pytest.mark.parametrize(
    ("options", "rows", "weights"),
    [
        ("", True, False),
        ("--snip-policy bf16", True, True),
        ("--snip-policy bf16 --snip-pin *.linear_fc1=fp8", True, False),
        ("--snip-policy bf16 --use-transformer-engine-op-fuser", False, False),  # no other code than its fuser
    ],
)
def test_experts_share_a_parameter_where_all_linears_stay_in_bf16(
    options: str, rows: bool, weights: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(f"--snip --num-layers 2 --moe-use-grouped-tensor {options}")
    flags = [f"--{name.replace('_', '-')}" for name in SINGLE]
    args = let_snip_choose(add_arguments(megatron_parser())).parse_args([*words, *flags])
    assert args.moe_use_grouped_tensor is rows
    assert [getattr(args, name) for name in SINGLE] == [weights] * 2
    assert (", ".join(flags) in capsys.readouterr().out) is not weights
    args.moe_single_grouped_weight = True  # by the arguments of a checkpoint
    assert bool(separate_experts(args)) is not weights
    assert args.moe_single_grouped_weight is weights


@pytest.mark.skipif("moe_dispatch_fwd_dtype" not in DEFAULTS, reason="Megatron 0.19 sends tokens in bf16")
def test_tokens_of_experts_are_sent_in_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--moe-dispatch-fwd-dtype", "mxfp8", "--moe-combine-bwd-dtype", "mxfp8"]
    args = let_snip_choose(add_arguments(megatron_parser())).parse_args(["--snip", *words])
    assert (args.moe_dispatch_fwd_dtype, args.moe_combine_bwd_dtype) == ("bf16", "bf16")
    assert "--moe-dispatch-fwd-dtype mxfp8, --moe-combine-bwd-dtype mxfp8 left out: SNIP" in capsys.readouterr().out


def test_without_snip_megatron_s_own_precision_stays() -> None:
    args = let_snip_choose(add_arguments(megatron_parser())).parse_args(["--fp8-format", "hybrid"])
    assert args.fp8 == "hybrid"
    assert not hasattr(args, "snip_recipe")


OF_NCCLEP = 1.5 if "moe_ncclep_static_shape" in DEFAULTS else None  # Megatron 0.20 runs ncclep without it


@pytest.mark.parametrize(("backend", "factor"), [("hybridep", None), ("ncclep", OF_NCCLEP)])
def test_the_bound_of_fused_operations_goes_with_them_where_the_backend_allows(
    backend: str, factor: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--use-transformer-engine-op-fuser", "--moe-paged-stash", "--moe-expert-rank-capacity-factor", "1.5"]
    parser = let_snip_choose(add_arguments(megatron_parser()))
    words += ["--cuda-graph-impl", "full_iteration", "--disable-bias-linear"]
    args = parser.parse_args(["--snip", *words, "--moe-flex-dispatcher-backend", backend])
    assert (args.moe_expert_rank_capacity_factor, args.moe_paged_stash) == (factor, False)
    parts = "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router moe_preprocess"
    assert ("--moe-expert-rank-capacity-factor 1.5" in (said := capsys.readouterr().out)) == (factor is None)
    assert (parts in said) == (args.cuda_graph_impl == "transformer_engine") == (factor is None)


@pytest.mark.parametrize(
    ("graphs", "delayed"),
    [
        ("none", True),
        ("transformer_engine", True),
        ("transformer_engine --no-gradient-accumulation-fusion", False),
        ("full_iteration", False),
    ],
)
def test_wgrads_are_delayed_beside_graphs_that_hold_the_address_of_gradients(
    graphs: str, delayed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = let_snip_choose(add_arguments(megatron_parser()))
    args = parser.parse_args(["--snip", "--delay-wgrad-compute", "--cuda-graph-impl", *graphs.split()])
    assert args.delay_wgrad_compute is delayed
    assert ("--delay-wgrad-compute left out" in capsys.readouterr().out) is not delayed


BLOCKWISE = "--fp8-format e4m3 --fp8-recipe blockwise"
DELAYED = "--fp8-format e4m3 --fp8-recipe delayed --fp8-amax-history-len 8 --fp8-amax-compute-algo max"


def blamed(options: str) -> argparse.Namespace:
    words = ["--snip-blame", "7", "--transformer-impl", "transformer_engine", *shlex.split(options)]
    return let_snip_choose(add_arguments(megatron_parser())).parse_args(words)


@pytest.mark.parametrize(
    ("options", "env", "recipe"),
    [
        ("--fp8-format hybrid", {}, HostRecipe("delayed", hybrid=True)),
        (f"{DELAYED} --fp8-margin 1", {}, HostRecipe("delayed", margin=1, history=8, most_recent=False)),
        ("--fp8-format hybrid --fp8-recipe tensorwise", {}, HostRecipe("tensorwise", hybrid=True)),
        (BLOCKWISE, {}, HostRecipe("blockwise", power_of_two=True)),
        (BLOCKWISE, {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}, HostRecipe("blockwise")),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", {}, HostRecipe("mxfp8")),
        ("--fp4-format e2m1", {"NVTE_NVFP4_DISABLE_RHT": "1"}, HostRecipe("nvfp4", hadamard=False)),
    ],
)
def test_blame_without_snip_looks_at_megatron_s_own_recipe(
    options: str, env: dict[str, str], recipe: HostRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    args = blamed(options)
    assert args.snip_host_recipe == recipe
    assert bool(args.fp8) is ("fp8-format" in options)  # Megatron's own FP8 stays on
    config = resolve_arguments(args)
    assert (config.enabled, config.updates, config.gemm, config.blame) == (True, False, "reference", "7")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--fp8-format e4m3 --fp8-recipe custom", "--fp8-recipe custom"),
        ("--fp8-format hybrid --fp8-param-gather", "--fp8-param-gather"),
        ("--fp8-format hybrid --transformer-impl local", "--transformer-impl local quantises nothing"),
    ],
)
def test_blame_refuses_what_it_cannot_emulate(options: str, named: str) -> None:
    with pytest.raises(SnipError, match=named):
        blamed(options)


def test_blame_with_a_map_is_that_of_a_job_under_snip() -> None:
    args = blamed("--snip-map map.json")
    assert (args.snip, args.snip_host_recipe, args.snip_gemm) == (True, None, None)


@pytest.mark.parametrize(
    ("graphs", "may", "modules"),
    [
        ("transformer_engine --cuda-graph-modules attn moe", True, ["attn", "moe_router", "moe_preprocess"]),
        ("transformer_engine --cuda-graph-modules attn moe_router", False, ["attn", "moe_router"]),
        ("full_iteration", False, []),
        ("none", False, []),
    ],
)
def test_megatron_allows_what_asks_for_graphs_with_experts(graphs: str, may: bool, modules: list[str]) -> None:
    """Megatron refuses ``moe`` there. The parts of ``moe`` that it allows take its place."""
    parser = let_snip_choose(add_arguments(megatron_parser()))
    words = ["--num-experts", "4", "--cuda-graph-impl", *graphs.split()]
    args = parser.parse_args(["--snip", *words])
    assert (args.snip_graphed_experts, [each.name for each in args.cuda_graph_modules]) == (may, modules)
    assert not hasattr(parser.parse_args(words), "snip_graphed_experts")

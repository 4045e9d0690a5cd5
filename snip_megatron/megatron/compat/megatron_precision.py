"""Megatron's own FP8 and FP4 beside ``--snip``: SNIP chooses the formats of linears, and their recipe says among which.

Megatron and Transformer Engine then train in BF16. Megatron Bridge's configurations have fields of the same names.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from snip_megatron.megatron.compat.graphs import let_graphs_hold_experts
from snip_megatron.megatron.startup import say
from snip_megatron.numerics.products.host_recipe import HostRecipe
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.options import given_options

RECIPES: dict[str, tuple[str, ...]] = {
    "delayed": ("fp8_tensor",),
    "tensorwise": ("fp8_tensor",),
    "blockwise": ("fp8",),
    "mxfp8": ("mxfp8",),
    "nvfp4": ("mxfp8", "nvfp4"),
}
"""Recipe of Transformer Engine → formats with the same scales. Other recipes have no such formats."""

# fmt: off
_OFF: dict[str, Any] = dict.fromkeys(("fp8", "fp4", "moe_expert_rank_capacity_factor")) | dict.fromkeys(
    ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype"), "bf16"  # since 0.20
) | dict.fromkeys(
    (
        "fp8_param", "fp4_param", "fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag",
        "fp8_dot_product_attention", "fp8_multi_head_attention", "fp8_output_proj",
        "moe_router_padding_for_quantization", "moe_router_padding_for_fp8", "use_transformer_engine_op_fuser",
        "moe_paged_stash", "moe_ncclep_static_shape", "moe_ncclep_zero_copy", "delay_wgrad_compute",
        "moe_single_grouped_weight", "moe_single_grouped_bias",
    ),
    False,
)
# fmt: on
"""Setting that needs Megatron's FP8 or FP4, or that runs linears by other code → its value while SNIP chooses formats.

Delayed wgrads stay, but beside CUDA graphs only where :func:`may_delay_wgrads` allows it: a GEMM must add them to
``main_grad``, which has a fixed address. ``moe_paged_stash``, ``moe_ncclep_*`` and ``moe_expert_rank_capacity_factor``
serve fused operations, whose buffers of tokens have a fixed size. Megatron runs a step again without that bound if its
tokens do not fit, so that training is the same without it. Only 0.19's backend ncclep needs the bound. Experts that
share one parameter run inside Transformer Engine only: each gets a weight of its own, unless ``--snip-policy bf16``
keeps all in bf16 (:func:`settings_of_experts`). Grouped tensors of rows (``moe_use_grouped_tensor``) go with the op
fuser alone.
"""
_SINGLE = ("moe_single_grouped_weight", "moe_single_grouped_bias")

_OF_0_19 = "moe_ncclep_static_shape"  # a setting that 0.20 no longer has


_OF_RECIPE = frozenset(("fp8", "fp4", "moe_router_padding_for_quantization", "moe_router_padding_for_fp8"))
"""Settings of :data:`_OFF` that stay while ``--snip-blame`` looks at a job of Megatron's own FP8 or FP4."""


def switch_off(settings: Any, unchanged: frozenset[str] = frozenset()) -> tuple[str, tuple[str, ...]]:
    """Switch Megatron's FP8 and FP4 off in arguments or a configuration of Bridge's. ``unchanged`` settings stay.

    Returns a line to print, empty if nothing was on, and the formats of the recipe.
    """
    off_now = {name: off for name, off in _OFF.items() if name not in unchanged}
    if getattr(settings, "use_transformer_engine_op_fuser", False):
        off_now["moe_use_grouped_tensor"] = False
    on = {name: value for name, off in off_now.items() if (value := getattr(settings, name, off)) not in (off, None)}
    if getattr(settings, "moe_flex_dispatcher_backend", None) == "ncclep" and hasattr(settings, _OF_0_19):
        on.pop("moe_expert_rank_capacity_factor", None)
    if may_delay_wgrads(settings):
        on.pop("delay_wgrad_compute", None)
    if not on:
        return "", ()
    graphs = _graph_parts(settings) if "moe_expert_rank_capacity_factor" in on else ""
    recipe = settings.fp4_recipe if on.get("fp4") else settings.fp8_recipe if on.get("fp8") else None
    for name in on:
        setattr(settings, name, off_now[name])
    arguments = ", ".join(_argument(name, value) for name, value in on.items())
    of_recipe = "" if recipe is None else f" with recipe {recipe}"
    return (
        f"{arguments}{of_recipe} left out: SNIP chooses the formats of linears; parameters, and what is no linear, stay"
        f" in BF16{graphs}",
        RECIPES.get(str(getattr(recipe, "value", recipe)), ()),
    )


def settings_of_experts(args: argparse.Namespace) -> frozenset[str]:
    """Return the settings that stay if Transformer Engine alone ever runs the linears of experts."""
    options = given_options(args, SnipConfig)
    all_bf16 = options.get("policy") == "bf16" and not options.keys() & {"map", "pin"} and args.snip_blame is None
    grouped = getattr(args, "moe_use_grouped_tensor", False) and not args.use_transformer_engine_op_fuser
    return frozenset(_SINGLE if all_bf16 and grouped else ())


def separate_experts(args: argparse.Namespace) -> str:
    """Give each expert weights of its own if SNIP may quantise them, also where a checkpoint has set the arguments.

    Returns a line to print, empty if nothing changes. Checkpoints are the same in both layouts.
    """
    return switch_off(args, frozenset(_OFF) - frozenset(_SINGLE) | settings_of_experts(args))[0]


def may_delay_wgrads(settings: Any) -> bool:
    """Return whether the graphs of ``settings``, if any, are those beside which wgrads can be delayed."""
    graphs = getattr(settings, "cuda_graph_impl", None)
    accumulates = getattr(settings, "gradient_accumulation_fusion", False)
    return graphs in (None, "none") or (graphs == "transformer_engine" and accumulates)


def _graph_parts(settings: Any) -> str:
    """Replace a graph of the iteration, which cannot contain experts, by graphs of the other parts.

    Returns a clause for the printed line.
    """
    scope = getattr(settings, "cuda_graph_scope", None)  # the older name of the modules
    if "full_iteration" not in (settings.cuda_graph_impl, scope):
        return ""
    biased = getattr(settings, "add_bias_linear", False) or getattr(settings, "add_qkv_bias", False)
    modules = ["moe_router", "moe_preprocess"] if biased else ["attn", "moe_router", "moe_preprocess"]
    settings.cuda_graph_impl, settings.cuda_graph_modules = "transformer_engine", modules
    settings.cuda_graph_scope = None
    return f"; --cuda-graph-impl transformer_engine --cuda-graph-modules {' '.join(modules)} for full_iteration"


def _argument(name: str, value: Any) -> str:
    argument = f"--{name.replace('_', '-')}" + ("-format" if name in ("fp8", "fp4") else "")
    return argument if value is True else f"{argument} {value}"


def let_snip_choose(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Let ``parser`` switch Megatron's FP8 and FP4 off where ``--snip`` is given, before Megatron validates arguments.

    The formats of the recipe become the attribute ``snip_recipe`` of the arguments.
    """
    parse = parser.parse_known_args

    def parse_known_args(*positional: Any, **named: Any) -> Any:
        args, unknown = parse(*positional, **named)
        if getattr(args, "snip_blame", None) is not None and not args.snip:
            _blame_without_snip(args)
        elif getattr(args, "snip", False):
            line, args.snip_recipe = switch_off(args, settings_of_experts(args))
            let_graphs_hold_experts(args)
            if line:
                say(line)
        return args, unknown

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    return parser


# -- blame of a job that has no map ------------------------------------------------------------------------------------
def _blame_without_snip(args: argparse.Namespace) -> None:
    """Let ``--snip-blame`` look at a job without ``--snip``: one of Megatron's own FP8 or FP4, or with a map.

    Raises SnipError if the recipe has no emulation.
    """
    args.snip, args.snip_host_recipe = True, None
    if args.snip_map is not None or not (args.fp8 or args.fp4):
        return
    for name in ("fp8_param_gather", "fp4_param_gather"):
        if getattr(args, name, False):
            raise SnipError(
                f"--snip-blame cannot be combined with {_argument(name, True)}: a checkpoint of such a job has rounded"
                " weights, which the passes cannot be compared on"
            )
    args.snip_host_recipe = host_recipe(args)
    _check_engine(args)
    args.snip_gemm, args.snip_fusions, args.snip_policy = "reference", "none", "bf16"
    line, _ = switch_off(args, _OF_RECIPE)
    if line:
        say(line.replace("SNIP chooses the formats of linears; p", "--snip-blame looks at linears; p"))


def _check_engine(args: argparse.Namespace) -> None:
    """Raise SnipError if Transformer Engine cannot multiply in the recipe here."""
    name = args.snip_host_recipe.name
    if args.transformer_impl != "transformer_engine":
        raise SnipError(
            f"--snip-blame: --transformer-impl {args.transformer_impl} quantises nothing under"
            f" {'--fp4-format' if args.fp4 else '--fp8-format'}; use transformer_engine, or give --snip-map"
        )
    if name in ("mxfp8", "nvfp4") and torch.cuda.is_available() and torch.cuda.get_device_capability() < (10, 0):
        raise SnipError(
            f"--snip-blame: recipe {name} needs a Blackwell GPU, and this is {torch.cuda.get_device_name()}"
        )


def host_recipe(settings: Any) -> HostRecipe:
    """Return the recipe of arguments with ``fp8`` or ``fp4``. Raises SnipError if there is no emulation of it.

    Transformer Engine reads some of it from the environment.
    """
    which = "fp4" if settings.fp4 else "fp8"
    recipe = getattr(settings, f"{which}_recipe")
    name = str(getattr(recipe, "value", recipe))
    unknown = [key for key in ("NVTE_BACKWARD_OVERRIDE", "NVTE_NVFP4_ROW_SCALED_ACTIVATION") if _is_set(key)]
    if os.environ.get("NVTE_NVFP4_4OVER6", "none") != "none":
        unknown.append("NVTE_NVFP4_4OVER6")
    if name not in RECIPES or unknown:
        what = f"--{which}-recipe {name}" if name not in RECIPES else unknown[0]
        raise SnipError(f"--snip-blame cannot be combined with {what}: SNIP has no emulation of its quantisation")
    power_of_two = _is_set("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES")
    if name == "blockwise":
        power_of_two = not _is_set("NVTE_FP8_BLOCK_SCALING_FP32_SCALES")
    return HostRecipe(
        name,
        hybrid=which == "fp8" and settings.fp8 == "hybrid",
        power_of_two=power_of_two,
        margin=settings.fp8_margin,
        history=settings.fp8_amax_history_len,
        most_recent=settings.fp8_amax_compute_algo == "most_recent",
        hadamard=not _is_set("NVTE_NVFP4_DISABLE_RHT"),
        stochastic=not _is_set("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING"),
        square=not _is_set("NVTE_NVFP4_DISABLE_2D_QUANTIZATION"),
    )


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("0", "")


def delayed_state(module: Any, expert: int, operand: str) -> tuple[Tensor, Tensor] | None:
    """Return the history of amaxes [length] and the scale (0-dim) of "x", "w" or "g" in Transformer Engine's linear.

    They are views. None before the first quantised forward of a linear that no checkpoint with a history was loaded to.
    """
    state = getattr(module, "fp8_meta", {}).get("scaling_bwd" if operand == "g" else "scaling_fwd")
    if state is None or not hasattr(state, "amax_history"):
        return None
    index = expert * 2 if operand == "g" else expert * 3 + (operand == "w")
    return state.amax_history[:, index], state.scale[index]


def shared_amax(settings: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that takes the maximum of an amax over the ranks with which Transformer Engine shares it."""
    tp_only = bool(getattr(settings, "tp_only_amax_red", False))

    def largest(amax: Tensor) -> Tensor:
        group = parallel_state.get_amax_reduction_group(with_context_parallel=True, tp_only_amax_red=tp_only)
        if dist.get_world_size(group) > 1:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
        return amax

    return largest

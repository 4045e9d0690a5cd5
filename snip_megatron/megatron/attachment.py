"""Puts SNIP around a call of Megatron's ``pretrain``, in SNIP's own entry and in other training scripts."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import megatron.core

from snip_megatron.megatron import compat
from snip_megatron.megatron.blame import prepare_blame
from snip_megatron.megatron.compat import pretraining
from snip_megatron.megatron.setup import SnipRun
from snip_megatron.megatron.startup import Startup, check_sources, say, untested
from snip_megatron.numerics.products.selection import native_backend, select_backend
from snip_megatron.precision.errors import SnipError, installed_version, located
from snip_megatron.runtime.agreement import Terms, configuration_table, of_launcher, rank_device, together
from snip_megatron.runtime.config import (
    EARLIEST_UPDATE,
    FASTEST,
    LOSS,
    SnipConfig,
    backend_of,
    dominated,
    resolve_arguments,
    training_steps,
)
from snip_megatron.runtime.controller import OnAdopt
from snip_megatron.runtime.options import given_options
from snip_megatron.timing.cost_model import load_cost_model

SHARED_ARGUMENTS = (
    *("bf16", "fp16", "transformer_impl", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel", "data_parallel_size"),
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("group_query_attention", "multi_latent_attention", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "swiglu"),
    *("num_experts", "moe_layer_freq", "moe_grouped_gemm", "hybrid_layer_pattern", "mtp_num_layers", "seq_length"),
    *("padded_vocab_size", "untie_embeddings_and_output_weights", "position_embedding_type", "first_last_layers_bf16"),
    *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "micro_batch_size", "global_batch_size"),
    *("train_iters", "train_samples", "rampup_batch_size", "seed", "eval_iters", "eval_micro_batch_size"),
    *("eval_global_batch_size", "full_validation", "multiple_validation_sets", "log_interval", "optimizer"),
    *("clip_grad", "lr", "min_lr", "lr_decay_style", "calculate_per_token_loss", "accumulate_allreduce_grads_in_fp32"),
    *("grad_reduce_in_bf16", "ddp_average_in_collective", "overlap_grad_reduce", "overlap_param_gather"),
    *("gradient_accumulation_fusion", "use_distributed_optimizer", "use_layer_wise_distributed_optimizer"),
    *("num_distributed_optimizer_instances", "optimizer_cpu_offload", "use_megatron_fsdp", "use_torch_fsdp2"),
    *("megatron_fsdp_version",),  # since 0.20
    *("data_parallel_sharding_strategy", "cuda_graph_impl", "cuda_graph_modules", "cuda_graph_warmup_steps"),
    *("recompute_granularity", "recompute_method", "recompute_modules", "recompute_num_layers", "tp_comm_overlap"),
    *("defer_embedding_wgrad_compute", "overlap_moe_expert_parallel_comm", "finetune", "ckpt_format", "ckpt_step"),
    *("non_persistent_ckpt_type", "mock_data", "sft", "dataloader_inter_document_masking", "snip_recipe"),
    *("fp8", "fp4", "disable_parameter_transpose_cache"),
    *("moe_use_grouped_tensor", "use_transformer_engine_op_fuser"),
)
"""Megatron's arguments that SNIP reads and that must be equal on all ranks."""


def prepare_megatron(args: argparse.Namespace, startup: Startup) -> None:
    """Check the machine, apply the compat sets that ``args`` needs, and print one line per set.

    Raises SnipError if ``args`` requires what this machine lacks.
    """
    compat.check(args, startup)
    if args.snip and (line := compat.separate_experts(args)):
        say(line)
    for line in filter(None, (untested(), *compat.apply(args, startup))):
        say(line, "compat")


def configuration(args: argparse.Namespace) -> tuple[SnipConfig, list[str]]:
    """Return SNIP's configuration on this machine, and lines about its defaults. Raises SnipError if it cannot work."""
    if not getattr(args, "snip", False):
        return resolve_arguments(args), []
    te_linears = args.transformer_impl == "transformer_engine"
    options = given_options(args, SnipConfig)
    native = native_backend(options.get("gemm", SnipConfig.gemm), te_linears=te_linears)
    config = resolve_arguments(args, native or _named_backend(options.get("timings")))
    if config.blame is not None or not (config.updates or config.late):
        return config, []
    lines = [dominated(config.budget, config.formats, native)]
    if "budget" not in options:
        free = "" if native else ": formats are emulated on this machine, which saves no time"
        budget = f"--snip-budget {config.budget} over {','.join(config.formats)}, schedule {config.schedule}{free}"
        if config.budget == FASTEST:
            budget = (
                f"--mock-data has no loss to protect: the fastest map over {','.join(config.formats)}; on your data the"
                f" default is --snip-budget {LOSS}"
            )
        lines.insert(0, budget)
    lines.append(None if getattr(args, "load", None) else _too_short(config, training_steps(args)))
    return config, [line for line in lines if line]


def _too_short(config: SnipConfig, steps: int | None) -> str | None:
    """Return a line about a run that ends before its first map, with what changes that. None if it does not."""
    first = config.first_update + config.lag
    if not config.updates or steps is None or first < steps:
        return None
    sooner = steps - 1 - config.lag
    earlier = f"--snip-first-update {sooner} or less" if sooner >= EARLIEST_UPDATE else "a smaller --snip-lag"
    return (
        f"this run trains in bf16 to its end, without an update: it has {steps} steps, and its first map would be"
        f" adopted after step {first} (--snip-first-update {config.first_update} + --snip-lag {config.lag}): use"
        f" --train-iters {first + 1} or more, or {earlier}"
    )


def _named_backend(timings: str | None) -> str | None:
    """Return the backend of the card that ``--snip-timings`` names, for a training that emulates its formats."""
    if timings is None:
        return None
    with located(f"--snip-timings {timings}"):
        return backend_of(load_cost_model(timings))


def prepare_run(
    args: argparse.Namespace, on_adopt: OnAdopt | None = None
) -> tuple[Callable[[Any], AbstractContextManager[None]], Terms]:
    """Check SNIP's configuration on this machine. No collective is called. ``on_adopt`` is as in ``attach``.

    Returns:
        A function that takes the configuration of the model, which gets the hook that converts it, and returns a
        context in which a training runs under SNIP if ``--snip`` was given; and what all ranks must agree about.

    Raises SnipError if the configuration cannot work.
    """
    with rank_device():
        config, lines = configuration(args)
        if not config.enabled:
            return nullcontext, Terms({"--snip": "no"})
        run = SnipRun(config, args, on_adopt)
        if config.blame is not None:
            prepare_blame(config, args)

        def under_snip(model_config: Any) -> AbstractContextManager[None]:
            for line in lines:
                say(line)
            return run.around(model_config)

        return under_snip, terms_of(run.config, args, run.use_library)


def terms_of(config: SnipConfig, args: argparse.Namespace, use_library: Callable[[str], None]) -> Terms:
    """Return what all ranks of a training under SNIP must agree about. ``use_library`` is called if they cannot."""
    version = megatron.core.__version__
    release = version.partition("+")[0]  # the rest is the commit of a checkout, or of what a virtual environment is in
    versions = {"megatron-core": release if release == installed_version("megatron-core") else version}
    if "transformer_engine" in (config.gemm, args.transformer_impl):
        versions["transformer-engine"] = str(installed_version("transformer-engine"))
    with rank_device():
        backend = select_backend(
            config.gemm, config.formats_in_use(), library=config.gemm_library, checks=False
        ).backend
        table = configuration_table(config, backend.name, backend.products, versions)
    values = {name: getattr(args, name) for name in SHARED_ARGUMENTS if hasattr(args, name)}
    arguments = {f"--{name.replace('_', '-')}": _text(value) for name, value in values.items()}
    return Terms({"--snip": "yes"} | table | arguments, use_library if config.gemm_library == "auto" else None)


def _text(value: Any) -> str:
    """Return a text that is the same for equal values on all ranks: without addresses, and sets in order."""
    if isinstance(value, set | frozenset):
        value = sorted(map(str, value))
    return type(value).__qualname__ if " at 0x" in str(value) else str(value)


def run_attached(
    pretrain: Callable[..., Any],
    positional: Sequence[Any],
    named: Mapping[str, Any],
    startup: Startup,
    on_adopt: OnAdopt | None = None,
) -> Any:
    """Call a script's ``pretrain`` under SNIP.

    All ranks raise SnipError if on one of them the configuration cannot work, or the script did not parse SNIP's
    arguments. ``pretrain`` may be a wrapper that takes the same arguments.
    """

    def prepare() -> tuple[Any, Terms]:
        call, args = pretraining.bound_call(positional, named), pretraining.parsed_arguments()
        if not hasattr(args, "snip"):
            check_sources([] if getattr(args, "yaml_cfg", None) is None else ["--yaml-cfg"])
            raise SnipError(
                "attach() finds no --snip arguments: parse with extra_args_provider=snip_arguments(<your provider, if"
                " any>)"
            )
        prepare_megatron(args, startup)
        under_snip, terms = prepare_run(args, on_adopt)
        return (call, under_snip), terms

    call, under_snip = together(prepare, of_launcher(), Path(sys.argv[0]).stem)
    with pretraining.hooked_model(call) as model, under_snip(model):
        return pretrain(*call.args, **call.kwargs)

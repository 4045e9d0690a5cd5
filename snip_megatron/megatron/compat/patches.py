"""The compatibility sets: run-time patches of Megatron and defaults of its arguments, as this machine needs them."""

import argparse
import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import megatron.core.datasets.utils as dataset_utils
import megatron.training.training as training
import torch
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from snip_megatron.megatron.compat import distributed_optimizer
from snip_megatron.megatron.compat.loop import hooks_in_source
from snip_megatron.megatron.compat.versions import changed, check_names, check_signature, nothing
from snip_megatron.megatron.startup import Startup, say
from snip_megatron.numerics.products.transformer_engine import import_fault
from snip_megatron.precision.errors import SnipError

check_signature(schedules.custom_backward, "output", "grad_output")
check_names(schedules, "deallocate_output_tensor")
check_signature(WrappedTorchNorm.__new__, "cls", "config", "hidden_size", "eps")
_make_norm = WrappedTorchNorm.__new__
PREBUILT = "the compiled dataset index builder is used as shipped"


def apply(args: argparse.Namespace, startup: Startup) -> list[str]:
    """Apply the compat sets that ``args`` needs and ``startup`` allows. Returns one line per set, to be printed.

    Raises SnipError if SNIP is on, Megatron's source has no hooks for it, and ``step-hook`` is off.
    """
    if args.snip and not startup.allows("step-hook") and not hooks_in_source():
        raise SnipError(
            "--snip-no-compat step-hook: this Megatron's source has no hook for SNIP; put it in with"
            " scripts/apply_patches.sh, or allow it at run time"
        )
    lines: dict[str, str] = {}
    if startup.on_cpu and startup.allows("cpu"):
        patch_for_cpu(training)
        lines["cpu"] = "CUDA calls answered by the CPU, its generator for the device's, no warm-up of fused kernels"
    if startup.allows("dataset-helpers") and dataset_helpers_are_prebuilt():
        dataset_utils.compile_helpers = nothing  # runs make, and would exit, as the wheel has no Makefile
        lines["dataset-helpers"] = PREBUILT
    if startup.allows("step-hook") and args.snip:  # which compat.loop installs later
        patched = "Megatron's train_step and evaluate wrapped at run time"
        in_source = "this Megatron's source has it, nothing is patched at run time"
        lines["step-hook"] = in_source if hooks_in_source() else patched
    if startup.allows("torch-norm-sequence-parallel") and args.sequence_parallel and args.transformer_impl == "local":
        WrappedTorchNorm.__new__ = _sharded_norm
        lines["torch-norm-sequence-parallel"] = (
            "torch norms accepted, their gradients summed over the tensor-parallel group"
        )
    repair = token_prediction_repair() if getattr(args, "mtp_num_layers", None) else {}
    if startup.allows("missing-extensions") and repair:
        vars(multi_token_prediction).update(repair)
        lines["missing-extensions"] = "multi-token prediction built without Transformer Engine"
    if startup.allows("distributed-optimizer-resume"):
        if getattr(args, "use_torch_fsdp2", False):
            lines["distributed-optimizer-resume"] = distributed_optimizer.install_for_torch_fsdp()
        elif args.use_distributed_optimizer and USING_PYTORCH_OPTIMIZER:  # neither Apex nor Transformer Engine
            lines["distributed-optimizer-resume"] = distributed_optimizer.install()
    return [f"{name}: {line}" for name, line in lines.items()]


def patch_for_cpu(start: Any) -> None:
    """Patch the module that starts a training. :mod:`snip_megatron.megatron.cpu_device` patches torch."""
    if not isinstance(start.initialize_megatron, functools.partial):
        start.initialize_megatron = functools.partial(start.initialize_megatron, allow_no_cuda=True)
    # set_jit_fusion_options warms fused kernels up with random inputs whose shape depends on the layout. On the CPU
    # they would advance the generator that initialises the weights, so that weights would depend on the layout.
    start.set_jit_fusion_options = nothing
    # Schedules free an output as soon as its send is queued, which is safe on a CUDA stream. gloo reads the memory
    # later, so that under an interleaved pipeline the next stage received what was written there meanwhile.
    schedules.deallocate_output_tensor, schedules.custom_backward = nothing, torch.autograd.backward
    # The tracker warns if work under a CUDA generator advances the CPU's generator. Here both are the same.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def dataset_helpers_are_prebuilt() -> bool:
    """Whether Megatron comes from a wheel, with a compiled index builder and without its Makefile."""
    folder = os.path.dirname(os.path.abspath(dataset_utils.__file__))
    built = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    return built and not os.path.exists(os.path.join(folder, "Makefile"))


def _sharded_norm(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Let Megatron's wrapper build torch's norm under ``--sequence-parallel``, which it refuses.

    A norm works on each token alone, so that it can run on shards of the sequence. Only the gradients of its weights
    must be summed over the tensor parallel group. Megatron does that for parameters marked ``sequence_parallel``.
    """
    with changed(config, sequence_parallel=False):
        norm = _make_norm(cls, config, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def token_prediction_repair() -> dict[str, Callable[[object], bool]]:
    """Return the function of Megatron's multi-token prediction to replace, if it fails without Transformer Engine.

    Megatron 0.20 asks whether a linear is one of two classes for inference, which are no classes then, so that
    ``isinstance`` raises TypeError. Megatron 0.19 has no such question.
    """
    name = "is_inference_column_parallel_linear"
    try:
        getattr(multi_token_prediction, name, bool)(None)
    except TypeError:
        return {name: lambda module: False}
    return {}


# -- defaults of arguments -------------------------------------------------------------------------------------
class Default(NamedTuple):
    """The argument ``flag`` sets ``dest`` to ``value``. No other value works if ``required`` is set."""

    flag: str
    dest: str
    value: Any
    required: bool = False


#: Defaults without a GPU: no CUDA kernels, no nccl, and weights initialised on the CPU.
CPU = (
    Default("--distributed-backend gloo", "distributed_backend", "gloo", required=True),
    Default("--transformer-impl local", "transformer_impl", "local", required=True),
    Default("--use-cpu-initialization", "use_cpu_initialization", True),
    Default("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", False, required=True),
    Default("--no-masked-softmax-fusion", "masked_softmax_fusion", False, required=True),
    Default("--no-persist-layer-norm", "no_persist_layer_norm", True, required=True),
    Default("--no-rope-fusion", "apply_rope_fusion", False, required=True),
    Default("--disable-jit-fuser", "disable_jit_fuser", True),
)

#: Extension module → the default that switches off the fusion which needs it.
EXTENSIONS = {
    "fused_weight_gradient_mlp_cuda": CPU[3],
    "scaled_upper_triang_masked_softmax_cuda": CPU[4],
    "apex": CPU[5],
    "transformer_engine": CPU[6],
}


def set_defaults(parser: argparse.ArgumentParser, startup: Startup) -> None:
    """Change the defaults of ``parser`` to what this machine can run, and print a line with the flags.

    A value that the user gives is kept, and :func:`check` refuses it if it cannot work.
    """
    if startup.on_cpu:
        name, defaults = "cpu", list(CPU)
    else:
        name, defaults = "missing-extensions", [d for e, d in EXTENSIONS.items() if importlib.util.find_spec(e) is None]
    if defaults and startup.allows(name):
        parser.set_defaults(**{default.dest: default.value for default in defaults})
        say(f"{name}: defaults {' '.join(default.flag for default in defaults)}", "compat")


def check(args: argparse.Namespace, startup: Startup) -> None:
    """Raise SnipError if ``args`` requires a GPU or an extension that this machine lacks."""
    for default in CPU if startup.on_cpu else ():
        value = getattr(args, default.dest)
        if default.required and value != default.value:
            argument = default.dest.replace("_", "-")
            raise SnipError(f"--{argument} {value}: impossible without a CUDA device; the CPU needs {default.flag}")
    if args.transformer_impl == "transformer_engine" and (fault := import_fault()) is not None:
        raise SnipError(
            f"--transformer-impl transformer_engine, Megatron's default, {fault}; install it or give"
            " --transformer-impl local"
        )

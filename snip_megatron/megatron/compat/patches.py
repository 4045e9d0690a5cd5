"""Applies the compat sets, run-time patches of Megatron, where they are needed, and lists them at start."""

import argparse
import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any

import megatron.core.datasets.utils as dataset_utils
import megatron.training.training as training
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from snip_megatron.megatron.compat import distributed_optimizer
from snip_megatron.megatron.compat.loop import hooks_in_source
from snip_megatron.megatron.compat.versions import changed, check_signature, nothing
from snip_megatron.megatron.startup import Startup
from snip_megatron.precision.errors import SnipError

check_signature(WrappedTorchNorm.__new__, "cls", "config", "hidden_size", "eps")
_make_norm = WrappedTorchNorm.__new__


def apply(args: argparse.Namespace, startup: Startup) -> list[str]:
    """Apply the compat sets that ``args`` needs and ``startup`` allows. Returns one line per set, to be printed.

    Raises SnipError if SNIP is on, Megatron's source has no hooks for it, and ``step-hook`` is off.
    """
    torch_norms = args.sequence_parallel and args.transformer_impl == "local"
    torch_adamw = args.use_distributed_optimizer and USING_PYTORCH_OPTIMIZER  # neither Apex nor Transformer Engine
    by_torch = getattr(args, "use_torch_fsdp2", False)
    steps = distributed_optimizer.install_for_shards_of_torch if by_torch else distributed_optimizer.install
    sets: dict[str, tuple[bool, Callable[[], str]]] = {
        "cpu": (startup.on_cpu, _patch_for_cpu),
        "dataset-helpers": (dataset_helpers_are_prebuilt(), _skip_dataset_build),
        "step-hook": (args.snip, _step_hook),
        "torch-norm-sequence-parallel": (torch_norms, _allow_torch_norms),
        "distributed-optimizer-resume": (torch_adamw or by_torch, steps),
    }
    if args.snip and not startup.allows("step-hook") and not hooks_in_source():
        raise SnipError(
            "--snip-no-compat step-hook: this Megatron's source has no hook for SNIP; put it in with"
            " scripts/apply_patches.sh, or allow it at run time"
        )
    return [f"{name}: {patch()}" for name, (needed, patch) in sets.items() if needed and startup.allows(name)]


def _patch_for_cpu() -> str:
    """Apply the part of ``cpu`` that patches Megatron. :mod:`snip_megatron.megatron.cpu_device` patches torch."""
    if not isinstance(training.initialize_megatron, functools.partial):
        training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)
    # set_jit_fusion_options warms fused kernels up with random inputs whose shape depends on the layout. On the CPU
    # they would advance the generator that initialises the weights, so that weights would depend on the layout.
    training.set_jit_fusion_options = nothing
    # The tracker warns if work under a CUDA generator advances the CPU's generator. Here both are the same.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
    return "CUDA calls answered by the CPU, its generator for the device's, no warm-up of fused kernels"


def _step_hook() -> str:
    """Describe the step hook, which :mod:`snip_megatron.megatron.compat.loop` installs later."""
    if hooks_in_source():
        return "this Megatron's source has it, nothing is patched at run time"
    return "Megatron's train_step and evaluate wrapped at run time"


def dataset_helpers_are_prebuilt() -> bool:
    """Whether Megatron comes from a wheel, with a compiled index builder and without its Makefile."""
    folder = os.path.dirname(os.path.abspath(dataset_utils.__file__))
    built = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    return built and not os.path.exists(os.path.join(folder, "Makefile"))


def _skip_dataset_build() -> str:
    """Skip the ``make`` that Megatron runs at start. It would exit, as the wheel has no Makefile."""
    dataset_utils.compile_helpers = nothing
    return "the compiled dataset index builder is used as shipped"


def _allow_torch_norms() -> str:
    """Let Megatron's wrapper build torch's norms under ``--sequence-parallel``, which it refuses.

    A norm works on each token alone, so it can run on shards of the sequence. Only the gradients of its weights must be
    summed over the tensor parallel group. Megatron does that for parameters marked ``sequence_parallel``.
    """

    def build(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        with changed(config, sequence_parallel=False):
            norm = _make_norm(cls, config, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = build
    return "torch norms accepted, their gradients summed over the tensor-parallel group"

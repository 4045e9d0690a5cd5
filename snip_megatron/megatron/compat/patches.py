"""The compat sets as run-time patches of Megatron. Each is applied where it is needed and listed at start."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import logging
import os
from typing import Any

import megatron.core.datasets.utils as dataset_utils
import megatron.training.training as training

from snip_megatron.errors import SnipError
from snip_megatron.megatron.compat import checkpoint_fallback, distributed_optimizer, restart_store, torch_norm
from snip_megatron.megatron.compat.loop import hooks_in_source
from snip_megatron.megatron.startup import Startup


def apply(args: argparse.Namespace, startup: Startup) -> list[str]:
    """Patch what ``args`` needs and ``startup`` allows. Returns one line a compat set, to be shown at start.

    Raises SnipError if ``args`` asks for SNIP, this Megatron's source has no hooks and ``step-hook`` is off.
    """
    needed = {
        "cpu": startup.on_cpu,
        "dataset-helpers": dataset_helpers_are_prebuilt(),
        "step-hook": args.snip,
        "torch-norm-sequence-parallel": args.sequence_parallel and args.transformer_impl == "local",
        "distributed-optimizer-resume": args.use_distributed_optimizer and distributed_optimizer.uses_torch_adamw(),
        "checkpoint-fallback": bool(args.load),
        "restart-store": restart_store.is_needed(),
    }
    patches = {
        "cpu": _patch_for_cpu,
        "dataset-helpers": _skip_dataset_build,
        "step-hook": _step_hook,
        "torch-norm-sequence-parallel": torch_norm.install,
        "distributed-optimizer-resume": distributed_optimizer.install,
        "checkpoint-fallback": checkpoint_fallback.install,
        "restart-store": restart_store.install,
    }
    if args.snip and not startup.allows("step-hook") and not hooks_in_source():
        raise SnipError(
            "--snip-no-compat step-hook: this Megatron's source has no hook for SNIP; put it in with"
            " scripts/apply_patches.sh, or allow it at run time"
        )
    lines = []
    for name, patch in patches.items():
        if needed[name] and startup.allows(name):
            lines.append(f"{name}: {patch()}")
    return lines


def _patch_for_cpu() -> str:
    """The Megatron half of ``cpu``; the torch half is ``cpu_device``."""
    if not isinstance(training.initialize_megatron, functools.partial):
        training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)
    # It warms fused kernels up with random inputs of the layout's shape. On the CPU these would come from the very
    # generator that initialises the weights, and make them depend on the layout.
    training.set_jit_fusion_options = _nothing
    # The tracker warns when work under a CUDA generator changes the CPU's: here they are one and the same.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
    return "CUDA calls answered by the CPU, its generator for the device's, no warm-up of fused kernels"


def _step_hook() -> str:
    """Said here, done by :mod:`snip_megatron.megatron.compat.loop` when SNIP enters the run."""
    if hooks_in_source():
        return "this Megatron's source has it, nothing is patched at run time"
    return "Megatron's train_step and evaluate wrapped at run time"


def dataset_helpers_are_prebuilt() -> bool:
    """Whether Megatron is the wheel, whose index builder is compiled and has no Makefile."""
    folder = os.path.dirname(os.path.abspath(dataset_utils.__file__))
    built = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    return built and not os.path.exists(os.path.join(folder, "Makefile"))


def _skip_dataset_build() -> str:
    """Megatron runs ``make`` at start and exits when that fails; the wheel has the result but no Makefile."""
    dataset_utils.compile_helpers = _nothing
    return "the compiled dataset index builder is used as shipped"


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None

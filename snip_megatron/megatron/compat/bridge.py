"""Private names of Megatron Bridge 0.6 and 0.7. Only ``snip_megatron.bridge`` imports this module."""

import functools
from collections.abc import Callable
from typing import Any

import megatron.bridge.training.initialize as initialize
import megatron.bridge.training.mixed_precision as mixed_precision
import megatron.bridge.training.setup as setup
import megatron.bridge.training.train as train

from snip_megatron.megatron.compat import patches
from snip_megatron.megatron.compat.megatron_precision import may_delay_wgrads, switch_off
from snip_megatron.megatron.compat.versions import check_names, check_signature, nothing
from snip_megatron.megatron.startup import Startup, say

_STEP = ("forward_step_func", "data_iterator", "model", "optimizer", "scheduler", "global_state", "pg_collection")


def check_interface() -> None:
    """Raise SnipError unless Bridge's training loop is that of these versions."""
    check_signature(train.train_step, *_STEP, "forward_backward_func")
    check_names(train.train, "train_step")


def wrap_train_step(wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace Bridge's ``train_step`` by ``wrapper(train_step)``. Returns a function that restores it.

    Bridge passes the parameters above, followed by others. The result is a tuple with the dict of losses at index 0
    (filled on the last pipeline stage), whether the step was skipped at index 1, and the gradient norm at index 5.
    """
    check_interface()
    genuine = train.train_step
    train.train_step = wrapper(genuine)
    return functools.partial(setattr, train, "train_step", genuine)


def let_snip_choose(container: Any) -> None:
    """Switch FP8 and FP4 off in Bridge's ``ConfigContainer``, in its recipe of mixed precision too, and say so."""
    if isinstance(container.mixed_precision, str):
        container.mixed_precision = mixed_precision.get_mixed_precision_config(container.mixed_precision)
    overlap = container.comm_overlap
    if getattr(overlap, "delay_wgrad_compute", None) and not may_delay_wgrads(container.model):
        overlap.delay_wgrad_compute = False
        say(
            "comm_overlap.delay_wgrad_compute left out beside CUDA graphs: Transformer Engine's alone allow it, with"
            " gradient_accumulation_fusion"
        )
    for settings in (container.model, container.ddp, container.optimizer, container.mixed_precision):
        line, _ = switch_off(settings)
        if line:
            say(line)


def apply(startup: Startup) -> None:
    """Apply the compat sets to Bridge's own start code, and print one line per set."""
    if startup.allows("dataset-helpers") and patches.dataset_helpers_are_prebuilt():
        initialize.compile_helpers = nothing
        say(f"dataset-helpers: {patches.PREBUILT}", "compat")
    if startup.on_cpu:
        patches.patch_for_cpu(setup)
        say("cpu: CUDA calls answered by the CPU, no warm-up of fused kernels", "compat")

"""Wraps functions of Megatron's training loop, and restores after a probe what only training may change."""

import argparse
import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import megatron.training.training as training
import numpy as np
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine, get_rerun_state_machine
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker

from snip_megatron.megatron.compat.versions import changed, check_names, check_signature, nothing

_LOGITS = "current_max_attn_logits"
_STEP = ("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler", "config")
check_signature(training.train_step, *_STEP, "forward_backward_func", "iteration")
check_names(training.train, "train_step")  # by its global name
check_names(RerunStateMachine.get_mode, "mode")
check_signature(
    training.evaluate, "forward_step_func", "data_iterator", "model", "process_non_loss_data_func", "config"
)
check_names(training.evaluate_and_print_results, "evaluate")
check_signature(OptimizerParamScheduler.get_lr, "self", "param_group")
check_names(OptimizerParamScheduler.get_lr, "num_steps")
check_names(PipelineOffloadManager, "OFFLOAD_MGR", "post_warmup_callback")
check_names(PipelineOffloadManager.reset, "post_warmup_callback", "_is_warmup")

TrainStep = Callable[..., Any]


def hooks_in_source() -> bool:
    """Whether this Megatron's source has SNIP's hooks (``patches/``), so that no patch at run time is needed."""
    return isinstance(getattr(training, "SNIP_HOOKS", None), dict)


def _replace(name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace ``training.<name>`` by ``wrapper(training.<name>)``. Returns a function that restores it.

    The wrapper goes into the table of hooks if Megatron's source has one, else into the module's global.
    """
    place: dict[str, Any] = training.SNIP_HOOKS if hooks_in_source() else vars(training)
    before = place.get(name, getattr(training, name))
    place[name] = wrapper(before)
    return functools.partial(place.__setitem__, name, before)


def wrap_train_step(wrapper: Callable[[TrainStep], TrainStep]) -> Callable[[], None]:
    """Replace Megatron's ``train_step`` by ``wrapper(train_step)``. Returns a function that restores it.

    Megatron passes the parameters checked above by position, and ``iteration`` (0-based) and others by name. The
    wrapped function must pass both on. It returns a tuple with the dict of losses at index 0 (filled on the last
    pipeline stage), whether the step was skipped at index 1, and the gradient norm at index 5.
    """
    return _replace("train_step", wrapper)


def wrap_evaluate(wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace Megatron's ``evaluate`` by ``wrapper(evaluate)``. Returns a function that restores it.

    Megatron passes ``forward_step_func, data_iterator, model, ...`` by position and ``eval_iters`` by name. The result
    is a tuple of the dict of losses (filled on the last pipeline stage), other data, and whether the time limit was
    reached.
    """
    return _replace("evaluate", wrapper)


def evaluations_watched(begin: Callable[[str], None]) -> AbstractContextManager[None]:
    """Call ``begin`` before each evaluation in this context, with Megatron's text (``iteration 8 on test set``)."""
    original = training.evaluate_and_print_results

    def evaluate_sets(prefix: str, *arguments: Any, **named: Any) -> Any:
        begin(prefix)
        return original(prefix, *arguments, **named)

    return changed(training, evaluate_and_print_results=evaluate_sets)


# -- passes outside of training --------------------------------------------------------------------------------
def rerun_disabled() -> AbstractContextManager[None]:
    """Switch Megatron's rerun state machine off inside this context.

    The machine asserts if it records a result outside of ``train_step``. Its ``validate_result`` is replaced as well:
    even in disabled mode it ends the job at a NaN, whereas a NaN in a probe must only drop the update.
    """
    # set_mode() would log a warning each time.
    return changed(get_rerun_state_machine(), mode=RerunMode.DISABLED, validate_result=nothing)


def quiet_schedule(model_config: Any) -> AbstractContextManager[None]:
    """Let Megatron's schedule run without gradient reduction, parameter gathering and timers inside this context.

    Layers run whole, one microbatch after the other, also where training overlaps parts of two microbatches. The output
    layer defers no wgrad, since Megatron's code for that fails with the single microbatch of a probe.
    """
    return changed(
        model_config,
        no_sync_func=contextlib.nullcontext,
        grad_sync_func=None,
        param_sync_func=None,
        finalize_model_grads_func=nothing,  # with None, Megatron would call its own
        timers=None,
        overlap_moe_expert_parallel_comm=False,
        defer_embedding_wgrad_compute=False,
    )


def separate_offloading(model_config: Any) -> AbstractContextManager[None]:
    """Give the one pass inside this context a manager of offloaded activations of its own.

    Megatron's manager learns from its first pass which activations it offloads in every later one. If that pass were a
    probe, as in a run that resumes at an update, only as many microbatches as the probe has would ever be offloaded.
    """
    if not getattr(model_config, "fine_grained_activation_offloading", False):
        return contextlib.nullcontext()
    manager = PipelineOffloadManager()
    manager.post_warmup_callback = nothing  # it exchanges a table between all ranks, and prints it
    return changed(PipelineOffloadManager, OFFLOAD_MGR=manager)


def gather_parameters(model: Sequence[Any]) -> None:
    """Finish the gather of parameters that ``--overlap-param-gather`` would run inside the next forward. Collective.

    A pass that fails on one rank does not leave others waiting in it then.
    """
    for chunk in model:
        if getattr(chunk, "remove_forward_pre_hook_handles", None):
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                group.finish_param_sync(skip_next_bucket_dispatch=True)


@contextlib.contextmanager
def loss_tokens_counted(model_config: Any) -> Iterator[list[torch.Tensor]]:
    """Yield a list that gets the number of tokens in the loss of each call of the schedule inside this context.

    Under ``--calculate-per-token-loss`` Megatron passes the number to ``finalize_model_grads_func``, which divides the
    gradients by it. It is this rank's number: 0 on all pipeline stages but the last.
    """
    counts: list[torch.Tensor] = []

    def count(model: Any, tokens: torch.Tensor | None = None, **keywords: Any) -> None:
        if tokens is not None:
            counts.append(tokens)

    with changed(model_config, finalize_model_grads_func=count):
        yield counts


@contextlib.contextmanager
def attention_logits_restored(model: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Restore the largest attention logits of a step at the end of this context. ``--qk-clip`` scales weights by them.

    Transformer Engine's attention stores them. A forward replaces the tensor and does not change it.
    """
    with contextlib.ExitStack() as stack:
        for module in (module for chunk in model for module in chunk.modules() if hasattr(module, _LOGITS)):
            stack.enter_context(changed(module, **{_LOGITS: getattr(module, _LOGITS)}))
        yield


def learning_rate(scheduler: Any, args: argparse.Namespace, step: int) -> Callable[[int], float]:
    """Return a function from a step to the learning rate of parameters without overrides.

    The scheduler counts samples. Their number is interpolated linearly up to ``step``, and from there to the end of the
    run, which is exact unless the batch size ramps up. ``step`` is the next training step, counted from 0.
    """
    trained, last = int(scheduler.num_steps), int(args.train_iters or 0)
    total = int(getattr(args, "train_samples", None) or last * int(args.global_batch_size))

    def rate(at: int) -> float:
        if at < step:
            samples = trained * at // step
        else:
            samples = trained + max(0, total - trained) * (at - step) // max(1, last - step)
        with changed(scheduler, num_steps=samples):
            return float(scheduler.get_lr({}))

    return rate


# The class is checked, because get_cuda_rng_tracker() would create a tracker before Megatron chooses its kind.
check_names(CudaRNGStatesTracker, "get_states", "set_states", "is_initialized")


def random_states() -> Callable[[], None]:
    """Copy all random states of this rank. Returns a function that restores them as often as it is called."""
    tracker = get_cuda_rng_tracker()
    python, cpu = random.getstate(), torch.get_rng_state()
    numpy = np.random.get_state()  # noqa: NPY002 - the global state is what data sets and Megatron draw from
    device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    copies = {
        name: (state.get_state() if isinstance(state, torch.Generator) else state).clone()
        for name, state in tracker.get_states().items()
    }

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(cpu)
        if device is not None:
            torch.cuda.set_rng_state(device)
        if not tracker.is_initialized():
            return
        states = tracker.get_states()
        for name, value in copies.items():
            if isinstance(states.get(name), torch.Generator):  # under CUDA graphs generators must stay the same objects
                states[name].set_state(value)
            else:
                states[name] = value.clone()
        tracker.set_states(states)

    return restore

"""Wraps functions of Megatron's training loop, reads its microbatches, and restores what only training may change."""

from __future__ import annotations

import argparse
import collections
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
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, RerunStateMachine, get_rerun_state_machine
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker
from megatron.training import global_vars

from snip_megatron.megatron.compat.versions import changed, check_names, check_signature, nothing
from snip_megatron.precision.errors import SnipError

_LOGITS = "current_max_attn_logits"
_STEP = ("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler", "config")
check_signature(training.train_step, *_STEP, "forward_backward_func", "iteration")
check_names(training.train, "train_step")  # by its global name
check_names(RerunStateMachine.get_mode, "mode")
check_signature(RerunDataIterator.__init__, "self", "iterable")
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


@contextlib.contextmanager
def quiet_schedule(model_config: Any) -> Iterator[list[torch.Tensor]]:
    """Let Megatron's schedule run without gradient reduction, parameter gathering and timers inside this context.

    Layers run whole, one microbatch after the other, also where training overlaps parts of two microbatches. The output
    layer defers no wgrad, since Megatron's code for that fails with the single microbatch of a probe.

    Yields a list that gets the number of tokens in the loss of each call of the schedule. Under
    ``--calculate-per-token-loss`` Megatron divides the gradients by it. It is this rank's number: 0 on all pipeline
    stages but the last.
    """
    counts: list[torch.Tensor] = []

    def count(model: Any, tokens: torch.Tensor | None = None, **keywords: Any) -> None:
        if tokens is not None:
            counts.append(tokens)

    with changed(
        model_config,
        no_sync_func=contextlib.nullcontext,
        grad_sync_func=None,
        param_sync_func=None,
        finalize_model_grads_func=count,
        timers=None,
        overlap_moe_expert_parallel_comm=False,
        defer_embedding_wgrad_compute=False,
    ):
        yield counts


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

    A pass that fails on one rank then leaves no other rank waiting in a gather.
    """
    for chunk in model:
        if getattr(chunk, "remove_forward_pre_hook_handles", None):
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                group.finish_param_sync(skip_next_bucket_dispatch=True)


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


# -- microbatches ------------------------------------------------------------------------------------------------
_RAMPS = ("--step-batch-size-schedule", "--rampup-batch-size")


def batch_size_ramp(args: argparse.Namespace) -> str | None:
    """Return the argument by which the batch size grows in training. None if there is none."""
    return next((name for name in _RAMPS if getattr(args, name[2:].replace("-", "_"), None) is not None), None)


_KEPT_STEPS = 3  # number of steps whose microbatches are kept: the guard sees the figures of a step two steps later


class PeekableIterator:
    """An iterator with :meth:`peek`, which returns the next items without consuming them.

    ``past`` has the first items of the latest steps, after :meth:`keep`.
    """

    def __init__(self, items: Any) -> None:
        self._items = items
        self._ahead: collections.deque[Any] = collections.deque()
        self.past: dict[int, list[Any]] = {}
        self._count = 0

    def __iter__(self) -> PeekableIterator:
        return self

    def __next__(self) -> Any:
        item = self._ahead.popleft() if self._ahead else next(self._items)
        if self.past and len(of_step := self.past[max(self.past)]) < self._count:
            of_step.append(_copy(item, None))
        return item

    def keep(self, step: int, count: int) -> None:
        """Keep the first ``count`` items that are read from now on, as those of ``step``."""
        self.past, self._count = {n: self.past[n] for n in sorted(self.past)[1 - _KEPT_STEPS :] if n < step}, count
        self.past[step] = []

    def __getattr__(self, name: str) -> Any:
        # Megatron calls save_state() of an external data loader. By then the step has consumed all peeked items.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._items, name)

    def peek(self, count: int) -> list[Any]:
        """Return the next ``count`` items, or fewer at the end of the data."""
        while len(self._ahead) < count:
            try:
                self._ahead.append(next(self._items))
            except StopIteration:
                break
        return list(self._ahead)[:count]


def repeated(data_iterator: Any, order: Sequence[int], sequences: int | None = None) -> Any:
    """Return an iterator over microbatches that ``train_step`` will read, without consuming them.

    The source of ``data_iterator`` is made peekable in place. The record of a step in Megatron's rerun machine is not
    affected. Raises SnipError if the iterator is of another type, or if ``order`` exceeds the end of the data.

    Args:
        data_iterator: A RerunDataIterator, a list of them (virtual pipeline), or None on a rank that reads no data.
        order: Numbers of the microbatches, 0 being the next one. A number may occur twice.
        sequences: Number of sequences to take from each microbatch if it is :func:`divisible`. None takes all.
    """
    if isinstance(data_iterator, list):
        return [repeated(each, order, sequences) for each in data_iterator]
    if data_iterator is None:
        return None
    count = max(order, default=-1) + 1
    batches = _peek(data_iterator, count)
    if len(batches) < count:
        raise SnipError(
            f"a probe or a second validation needs {count} microbatches, and the data holds {len(batches)} more"
        )
    return (_copy(batches[i], sequences) for i in order)


def keep_microbatches(data_iterator: Any, step: int, count: int) -> None:
    """Keep the first ``count`` microbatches that ``train_step`` will read in ``step``, for some steps."""
    for each in data_iterator if isinstance(data_iterator, list) else [data_iterator]:
        if each is not None:
            _peekable(each).keep(step, count)


def past_microbatches(data_iterator: Any, step: int, count: int) -> Any:
    """Return an iterator like ``data_iterator`` over ``count`` microbatches of ``step``, or raise SnipError."""
    if isinstance(data_iterator, list):
        return [past_microbatches(each, step, count) for each in data_iterator]
    if data_iterator is None:
        return None
    past = _peekable(data_iterator).past.get(step, [])
    if len(past) < count:
        raise SnipError(f"the microbatches of step {step} were not kept")
    return RerunDataIterator(iter(past))


def _peek(iterator: Any, count: int) -> list[Any]:
    source = _peekable(iterator)
    if iterator.replaying:  # the rerun machine repeats this step after a restart
        return list(iterator.saved_microbatches[iterator.replay_pos :][:count])
    return source.peek(count)


def _peekable(iterator: Any) -> PeekableIterator:
    if not isinstance(iterator, RerunDataIterator):
        raise SnipError(f"the data iterator is a {type(iterator).__name__}, not Megatron's RerunDataIterator")
    if not isinstance(iterator.iterable, PeekableIterator):
        iterator.iterable = PeekableIterator(iterator.iterable)
    return iterator.iterable


def _copy(batch: Any, sequences: int | None) -> Any:
    """Copy a microbatch, because a forward step may replace entries of its dictionary."""
    if not isinstance(batch, dict):
        return batch
    return {name: value if value is None or sequences is None else value[:sequences] for name, value in batch.items()}


def divisible(data_iterator: Any, args: argparse.Namespace) -> bool:
    """Return whether a pass can take some sequences of the microbatches of ``data_iterator`` alone.

    Microbatches must be dictionaries of tensors [microbatch, ...], as those of Megatron's data sets are, and must not
    be packed. A rank that reads no data takes the size of a microbatch from Megatron's global arguments, which Bridge
    does not have. The buffers of ``--tp-comm-overlap`` have the size of a whole microbatch.
    """
    if args.tensor_model_parallel_size > 1 and (global_vars._GLOBAL_ARGS is not args or args.tp_comm_overlap):
        return False
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    for batch in (batch for each in iterators if each is not None for batch in _peek(each, 1)):
        if not isinstance(batch, dict) or any("seqlen" in name for name in batch):
            return False
        tensors = [value for value in batch.values() if value is not None]
        if not all(isinstance(each, torch.Tensor) and each.shape[:1] == (args.micro_batch_size,) for each in tensors):
            return False
    return True

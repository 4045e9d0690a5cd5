"""The training loop: wrapping its step, and quiet conditions for passes that are not training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import megatron.training.training as training
from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine, get_rerun_state_machine

from snip_megatron.errors import SnipError
from snip_megatron.megatron.compat.versions import check_signature

_STEP_PARAMETERS = (
    "forward_step_func",
    "data_iterator",
    "model",
    "optimizer",
    "opt_param_scheduler",
    "config",
    "forward_backward_func",
    "iteration",
)
check_signature(training.train_step, _STEP_PARAMETERS, "train_step")
if "train_step" not in training.train.__code__.co_names:
    raise SnipError("Megatron's train() no longer looks train_step up by its global name: the step hook cannot work")
if "mode" not in RerunStateMachine.get_mode.__code__.co_names:
    raise SnipError("Megatron's rerun machine no longer keeps its mode in 'mode': probes cannot switch it off")

TrainStep = Callable[..., Any]


def hooks_in_source() -> bool:
    """Whether this Megatron has SNIP's hooks in its source (``patches/``), so that its loop needs no run-time patch."""
    return isinstance(getattr(training, "SNIP_HOOKS", None), dict)


def _replace(name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """``wrapper(training.<name>)`` in its place: in the source's table of hooks, else the module's global."""
    original = getattr(training, name)
    if hooks_in_source():
        hooks: dict[str, Callable[..., Any]] = training.SNIP_HOOKS
        before = hooks.get(name)
        hooks[name] = wrapper(before or original)

        def unhook() -> None:
            if before is None:
                hooks.pop(name, None)
            else:
                hooks[name] = before

        return unhook
    setattr(training, name, wrapper(original))

    def undo() -> None:
        setattr(training, name, original)

    return undo


def wrap_train_step(wrapper: Callable[[TrainStep], TrainStep]) -> Callable[[], None]:
    """Replace Megatron's ``train_step`` by ``wrapper(train_step)``; returns what undoes it.

    Megatron calls it with ``forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config,
    forward_backward_func`` by position and the rest (``iteration``, 0-based, and version-dependent ones) by name: pass
    both on. It returns a tuple: dict of losses (last pipeline stage only), whether the step was skipped, ...,
    gradient norm at index 5.
    """
    return _replace("train_step", wrapper)


_EVALUATE_PARAMETERS = ("forward_step_func", "data_iterator", "model", "process_non_loss_data_func", "config")
check_signature(training.evaluate, _EVALUATE_PARAMETERS, "evaluate")
if "evaluate" not in training.evaluate_and_print_results.__code__.co_names:
    raise SnipError(
        "Megatron's evaluate_and_print_results() no longer looks evaluate up: validation cannot be recorded"
    )


def wrap_evaluate(wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace Megatron's ``evaluate`` by ``wrapper(evaluate)``; returns what undoes it.

    Megatron calls it with ``forward_step_func, data_iterator, model, ...`` by position and ``eval_iters`` by name. It
    returns (dict of losses, filled on the last pipeline stage; other data; whether the time limit was hit).
    """
    return _replace("evaluate", wrapper)


# -- quiet conditions ------------------------------------------------------------------------------------------
@contextlib.contextmanager
def rerun_disabled() -> Iterator[None]:
    """Megatron's rerun machine off: results outside ``train_step`` must not be recorded (it asserts).

    Nor judged: switched off it still ends the job at a NaN, and that of a probe only drops an update (rule 5).
    """
    machine = get_rerun_state_machine()
    mode, validate = machine.mode, machine.validate_result
    # Not set_mode(): it logs a warning each time.
    machine.mode = RerunMode.DISABLED
    machine.validate_result = _nothing
    try:
        yield
    finally:
        machine.validate_result = validate
        machine.mode = mode


@contextlib.contextmanager
def quiet_schedule(model_config: Any) -> Iterator[None]:
    """A schedule run under this neither reduces gradients, nor gathers parameters, nor times itself."""
    quiet: dict[str, Any] = {
        "no_sync_func": contextlib.nullcontext,
        "grad_sync_func": None,
        "param_sync_func": None,
        # Not None: Megatron calls it where it is set and falls back to its own elsewhere.
        "finalize_model_grads_func": _nothing,
        "timers": None,
    }
    before = {name: getattr(model_config, name) for name in quiet}
    for name, value in quiet.items():
        setattr(model_config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(model_config, name, value)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None

"""Saves and restores all random states that a forward and backward pass can advance."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker

from snip_megatron.megatron.compat.versions import check_names

# The class is checked, because get_cuda_rng_tracker() would create a tracker before Megatron chooses its kind.
check_names(CudaRNGStatesTracker, "get_states", "set_states", "is_initialized")


@dataclass(frozen=True)
class RandomState:
    """Copies of the random states of Python, NumPy, torch (CPU and GPU) and Megatron's RNG tracker."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    device: torch.Tensor | None
    tracker: dict[str, torch.Tensor]


def rng_state() -> RandomState:
    """Copy every random state of this process."""
    states = get_cuda_rng_tracker().get_states()
    return RandomState(
        python=random.getstate(),
        numpy=np.random.get_state(),  # noqa: NPY002 - the global state is what data sets and Megatron draw from
        cpu=torch.get_rng_state(),
        device=torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        tracker={
            name: (state.get_state() if isinstance(state, torch.Generator) else state).clone()
            for name, state in states.items()
        },
    )


def set_rng_state(state: RandomState) -> None:
    """Restore the states that :func:`rng_state` copied. ``state`` can be used again."""
    random.setstate(state.python)
    np.random.set_state(state.numpy)  # noqa: NPY002
    torch.set_rng_state(state.cpu)
    if state.device is not None:
        torch.cuda.set_rng_state(state.device)
    tracker = get_cuda_rng_tracker()
    if tracker.is_initialized():
        states = tracker.get_states()
        for name, value in state.tracker.items():
            if isinstance(states.get(name), torch.Generator):  # under CUDA graphs generators must stay the same objects
                states[name].set_state(value)
            else:
                states[name] = value.clone()
        tracker.set_states(states)

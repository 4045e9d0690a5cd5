"""The state of a step that linears in CUDA graphs read from device memory.

It consists of the keys of stochastic rounding, the signs of Hadamard transforms and, for each model chunk, a flag that
says whether its weights are quantised already. A CUDA graph repeats kernels and runs no Python, so that the step hooks
write this state to fixed addresses, where captured kernels read it.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from snip_megatron.layers.context import GEMM_INDEX, GraphedState, LinearHandle, signs_of
from snip_megatron.layers.weights import GraphedWeight
from snip_megatron.numerics.quantize.device_keys import DeviceKeys, LinearIdentity
from snip_megatron.precision import Gemm

_GEMMS = GEMM_INDEX[Gemm.DGRAD], GEMM_INDEX[Gemm.WGRAD]
_APART = 4  # distance of two chunks' flags in int32: 16 bytes, the alignment that kernels are compiled for


class DeviceStep:
    """The device state of the linears of a rank. It must be made before the first graph is captured.

    The ``graphed`` states of ``handles`` are set; ``chunks`` is the index of the model chunk of each.
    """

    def __init__(self, handles: Sequence[LinearHandle], chunks: Sequence[int], device: torch.device) -> None:
        numbers = [(h.index, h.global_microbatch(0), h.global_microbatch(1)) for h in handles]
        identities = [LinearIdentity(index, factor=second - first, offset=first) for index, first, second in numbers]
        self._keys = DeviceKeys(identities, _GEMMS, device)
        self._current = torch.zeros(max(chunks, default=0) + 1, _APART, dtype=torch.int32, device=device)
        self._signs = torch.zeros(len(handles), _APART, dtype=torch.int32, device=device)
        self._handles = list(handles)
        for place, (handle, chunk) in enumerate(zip(handles, chunks, strict=True)):
            weight = GraphedWeight(self._current[chunk, :1])
            handle.state.graphed = GraphedState(weight, partial(self._keys.next, place), self._signs[place, :1])

    def start_step(self, seed: int, step: int) -> None:
        """Prepare for the first microbatch of a step. This does not wait for the device."""
        self._keys.start_step(seed, step)
        signs = signs_of(self._handles, seed, step)
        self._signs[:, 0].copy_(torch.tensor(signs, dtype=torch.int32), non_blocking=True)
        self.weights_changed()

    def weights_changed(self) -> None:
        """Make forwards quantise their weights again, until :meth:`weights_are_current` is called."""
        self._current.zero_()

    def weights_are_current(self, chunk: int) -> None:
        """Make later forwards of ``chunk`` use the weights that a finished microbatch has quantised."""
        self._current[chunk].fill_(1)

    def forget_weights(self, handles: Iterable[LinearHandle]) -> None:
        """Free the quantised weights of ``handles``. Graphs that read them must not run afterwards."""
        for handle in handles:
            assert handle.state.graphed is not None
            handle.state.graphed.weight.clear()

"""Quantisers of tiles whose stochastic rounding is launched, as a kernel, by a stand-in for CUDA's driver."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from snip_megatron.quantization import packed
from snip_megatron.quantization.kernels.arguments import key_arguments, tile_output
from snip_megatron.quantization.kernels.replay import recording
from snip_megatron.quantization.packed import Operand, Operands

_POINTER = ctypes.c_void_p
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, *[ctypes.c_uint] * 7, _POINTER, ctypes.POINTER(_POINTER), _POINTER)


class LaunchedQuantizers:
    """The functions of ``packed``, but seeds of gradients reach the quantiser as key words, which a replay changes.

    Attributes:
        driver: address of a function with the arguments of ``cuLaunchKernel``.
        launches: number of launches of replays.
    """

    quantize_blocks = staticmethod(packed.quantize_blocks)
    quantize_tensor = staticmethod(packed.quantize_tensor)

    def __init__(self) -> None:
        self._kernels: dict[int, Callable[[list[Tensor], list[int]], None]] = {}
        self._likes: dict[int, tuple[Tensor, ...]] = {}
        self._names = itertools.count(1)
        self._function = _LAUNCH(self._launch)
        self.driver = int(ctypes.cast(self._function, _POINTER).value or 0)
        self.launches = 0

    def quantize_tiles(
        self, x: Tensor, row: Any, col: Any, *, row_seed: Any = None, col_seed: Any = None, **options: Any
    ) -> Operands:
        """Quantise as ``packed`` does, by a launch if there are seeds."""
        if row_seed is None or col_seed is None:
            return packed.quantize_tiles(x, row, col, row_seed=row_seed, col_seed=col_seed, **options)
        sides = tile_output(x, row, *x.shape)[0], tile_output(x, col, *reversed(x.shape))[0]
        tensors = (x, options["cols"], *_tensors(sides))
        first_row = options["first_row"]

        def kernel(memory: list[Tensor], words: list[int]) -> None:
            source, cols, *results = memory
            keys = torch.tensor(words, dtype=torch.int32).view(2, 2)
            seeds = {"row_seed": keys[0], "col_seed": keys[1]}
            made = packed.quantize_tiles(source, row, col, **seeds, first_row=first_row, cols=cols)
            for result, tensor in zip(results, _tensors((made.row, made.col)), strict=True):
                result.copy_(tensor)

        words = [*key_arguments(row_seed), *key_arguments(col_seed)]
        with _disable_current_modes():  # a recording does not see what a kernel computes
            kernel(list(tensors), [int(word) for word in words])
        noted = recording()
        if noted is not None:
            noted.launch(self._compiled(kernel, tensors), (1, 1), tensors, words)
        return Operands(*sides)

    def _compiled(self, kernel: Callable[..., None], tensors: tuple[Tensor, ...]) -> Any:
        name = next(self._names)
        self._kernels[name], self._likes[name] = kernel, tensors
        signature = ["*i8"] * len(tensors) + ["i32"] * 4
        metadata = SimpleNamespace(num_ctas=1, num_warps=4, shared=0)
        return SimpleNamespace(
            function=name, metadata=metadata, src=SimpleNamespace(signature=dict(enumerate(signature)))
        )

    def _launch(self, name: int, *given: Any) -> int:
        self.launches += 1
        likes, places = self._likes[name], given[-2]
        addresses = [ctypes.c_uint64.from_address(places[i]).value for i in range(len(likes))]
        words = [ctypes.c_int32.from_address(places[len(likes) + i]).value for i in range(4)]
        with torch.no_grad():
            self._kernels[name](list(map(_at, addresses, likes)), words)
        return 0


def _tensors(sides: tuple[Operand | None, Operand | None]) -> list[Tensor]:
    return [t for side in sides if side is not None for t in (side.values, side.scale)]


def _at(address: int, like: Tensor) -> Tensor:
    """The tensor at an address."""
    size = like.itemsize * (1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True)))
    memory = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)
    return memory.view(like.dtype).as_strided(like.shape, like.stride())

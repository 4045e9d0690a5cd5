"""The Hopper backend with its work on the device replayed by C++, for linears whose time the host bounds.

A forward of a linear is one replay, and so is a backward whose GEMMs run at once.
Every method gives the bits of :class:`snip_megatron.gemm.hopper.HopperBackend`, which runs the first calls with given
shapes and formats, and every call that cannot be replayed (:mod:`snip_megatron.quantization.kernels.replay`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from snip_megatron.gemm.backend import Sides
from snip_megatron.gemm.hopper import HopperBackend
from snip_megatron.gemm.operands import Apart, GradientKeys, HeldSides, Plain, Side
from snip_megatron.precision import Format
from snip_megatron.quantization.exact import ExactOperand
from snip_megatron.quantization.hadamard import Rotation
from snip_megatron.quantization.kernels.arguments import are_pairs
from snip_megatron.quantization.kernels.replay import Replayed
from snip_megatron.quantization.packed import Operand
from snip_megatron.quantization.rounding import Key

Seeds = tuple[Any, ...]
Random = tuple[Key | str | None, Key | str | None, Any, bool]
TYPES = (Operand, ExactOperand, Plain)
"""The operands that this backend passes between its methods."""
_SMALL = 256  # rows, columns and reduction of the GEMMs that are compared before the first use
_SEED = "seed"  # stands for a key that is a number: the number is a seed of the call


class ReplayedHopperBackend(HopperBackend):
    """A Hopper backend whose calls are replayed.

    Args:
        extension: of :func:`snip_megatron.quantization.kernels.replay_build.compiled_extension`.
        python: runs the calls that are not replayed.

    Attributes:
        python: the argument.
        replayed: the calls, by what they compute.
    """

    def __init__(self, extension: Any, python: HopperBackend) -> None:
        super().__init__(python._quantizers, python._products, python._others, python._activations)
        self.python = python

        def gradient(seeds: Seeds, g: Tensor, dgrad: Any, wgrad: Any, random: Random, row: int, amax: Any) -> Sides:
            return python.quantize_gradient(g, dgrad, wgrad, _joined(seeds, random, row), amax=amax)

        def swiglu_gradient(seeds: Seeds, d: Tensor, y: Tensor, dgrad: Any, wgrad: Any, random: Random) -> Sides:
            return python.quantize_swiglu_gradient(d, y, dgrad, wgrad, _joined(seeds, random, 0))

        functions: dict[str, Callable[..., Any]] = {
            "input": lambda _, x, fprop, wgrad, amax: python.quantize_input(x, fprop, wgrad, amax=amax),
            "weight": lambda _, w, fprop, dgrad, amax: python.quantize_weight(w, fprop, dgrad, amax=amax),
            "gradient": gradient,
            "swiglu": lambda _, y, fprop, wgrad: python.quantize_swiglu(y, fprop, wgrad),
            "swiglu_gradient": swiglu_gradient,
            "swiglu_amax": lambda _, y: python.swiglu_with_amax(y),
            "swiglu_gradient_amax": lambda _, d, y: python.swiglu_gradient_with_amax(d, y),
            "fprop": lambda _, x, w, dtype: python.fprop(x, w, dtype=dtype),
            "dgrad": lambda _, g, w, dtype: python.dgrad(g, w, dtype=dtype),
            "wgrad": lambda _, g, x, out: python.wgrad(g, x, out=out),
        }
        functions |= self._composed()
        self.replayed = {name: Replayed(extension, function) for name, function in functions.items()}
        calls = {name: replayed.call for name, replayed in self.replayed.items()}
        self._input, self._weight, self._gradient = calls["input"], calls["weight"], calls["gradient"]
        self._swiglu, self._swiglu_gradient = calls["swiglu"], calls["swiglu_gradient"]
        self._swiglu_amax, self._swiglu_gradient_amax = calls["swiglu_amax"], calls["swiglu_gradient_amax"]
        self._fprop, self._dgrad, self._wgrad = calls["fprop"], calls["dgrad"], calls["wgrad"]
        self._forward, self._backward = calls["forward"], calls["backward"]
        self._input_gradient = calls["input_gradient"]

    def _composed(self) -> dict[str, Callable[..., Any]]:
        """Return the functions that call several of this backend's methods.

        They are recorded as a whole. Where that is not possible, the methods are replayed one by one.
        """
        base = HopperBackend

        def input_gradient(
            seeds: Seeds, g: Tensor, w: Side, dgrad: Any, wgrad: Any, random: Random, amax: Any
        ) -> tuple[Tensor, Side]:
            return base.input_gradient(self, g, w, dgrad, wgrad, _joined(seeds, random, 0), amax=amax)

        def backward(
            seeds: Seeds, g: Tensor, w: Side, x: Apart, dgrad: Any, wgrad: Any, random: Random, out: Any, amax: Any
        ) -> tuple[Tensor, Tensor]:
            return base.backward(self, g, w, x, dgrad, wgrad, _joined(seeds, random, 0), out=out, amax=amax)

        return {
            "forward": lambda _, x, w, fprop, wgrad, amax: base.forward(self, x, w, fprop, wgrad, amax=amax),
            "input_gradient": input_gradient,
            "backward": backward,
        }

    # -- quantisation --------------------------------------------------------------------------------------------
    def quantize_input(
        self,
        x: Tensor,
        fprop: Format | None,
        wgrad: Format | None,
        *,
        amax: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Sides:
        """See the base class. Signs of Hadamard transforms differ from step to step, so that Python transforms."""
        if rotation is not None:
            return self.python.quantize_input(x, fprop, wgrad, amax=amax, rotation=rotation)
        return self._input((), x, fprop, wgrad, amax)  # type: ignore[no-any-return]

    def quantize_weight(
        self,
        w: Tensor,
        fprop: Format | None,
        dgrad: Format | None,
        *,
        amax: Tensor | None = None,
        held: HeldSides | None = None,
    ) -> Sides:
        """See the base class."""
        if held is not None:
            return self.python.quantize_weight(w, fprop, dgrad, amax=amax, held=held)
        return self._weight((), w, fprop, dgrad, amax)  # type: ignore[no-any-return]

    def quantize_gradient(
        self,
        g: Tensor,
        dgrad: Format | None,
        wgrad: Format | None,
        keys: GradientKeys,
        *,
        amax: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Sides:
        """See the base class."""
        if rotation is not None:
            return self.python.quantize_gradient(g, dgrad, wgrad, keys, amax=amax, rotation=rotation)
        seeds, random = _split(keys)
        return self._gradient(seeds, g, dgrad, wgrad, random, keys.first_row, amax)  # type: ignore[no-any-return]

    def quantize_swiglu(self, y: Tensor, fprop: Format | None, wgrad: Format | None) -> Sides:
        """See the base class."""
        return self._swiglu((), y, fprop, wgrad)  # type: ignore[no-any-return]

    def quantize_swiglu_gradient(
        self, d: Tensor, y: Tensor, dgrad: Format | None, wgrad: Format | None, keys: GradientKeys
    ) -> Sides:
        """See the base class."""
        seeds, random = _split(keys)
        return self._swiglu_gradient(seeds, d, y, dgrad, wgrad, random)  # type: ignore[no-any-return]

    def swiglu_with_amax(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """See the base class."""
        return self._swiglu_amax((), y)  # type: ignore[no-any-return]

    def swiglu_gradient_with_amax(self, d: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """See the base class."""
        return self._swiglu_gradient_amax((), d, y)  # type: ignore[no-any-return]

    # -- products ------------------------------------------------------------------------------------------------
    def fprop(self, x: Side, w: Side, *, dtype: torch.dtype) -> Tensor:
        """See the base class."""
        return self._fprop((), x, w, dtype)  # type: ignore[no-any-return]

    def dgrad(self, g: Side, w: Side, *, dtype: torch.dtype) -> Tensor:
        """See the base class."""
        return self._dgrad((), g, w, dtype)  # type: ignore[no-any-return]

    def wgrad(self, g: Side, x: Side, *, out: Tensor | None) -> Tensor:
        """See the base class."""
        return self._wgrad((), g, x, out)  # type: ignore[no-any-return]

    # -- both --------------------------------------------------------------------------------------------------------
    def forward(
        self,
        x: Tensor,
        w: Side,
        fprop: Format,
        wgrad: Format | None,
        *,
        amax: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, Apart | None]:
        """See the base class."""
        if rotation is not None:
            return super().forward(x, w, fprop, wgrad, amax=amax, rotation=rotation)
        return self._forward((), x, w, fprop, wgrad, amax)  # type: ignore[no-any-return]

    def input_gradient(
        self,
        g: Tensor,
        w: Side,
        dgrad: Format,
        wgrad: Format,
        keys: GradientKeys,
        *,
        amax: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, Side]:
        """See the base class."""
        if rotation is not None or keys.first_row:
            return super().input_gradient(g, w, dgrad, wgrad, keys, amax=amax, rotation=rotation)
        seeds, random = _split(keys)
        return self._input_gradient(seeds, g, w, dgrad, wgrad, random, amax)  # type: ignore[no-any-return]

    def backward(
        self,
        g: Tensor,
        w: Side,
        x: Apart,
        dgrad: Format,
        wgrad: Format,
        keys: GradientKeys,
        *,
        out: Tensor | None,
        amax: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See the base class."""
        if rotation is not None or keys.first_row:
            return super().backward(g, w, x, dgrad, wgrad, keys, out=out, amax=amax, rotation=rotation)
        seeds, random = _split(keys)
        return self._backward(seeds, g, w, x, dgrad, wgrad, random, out, amax)  # type: ignore[no-any-return]


def difference(replayed: HopperBackend, python: HopperBackend, device: torch.device) -> str | None:
    """Compare small GEMMs of both backends bit by bit. Returns what is wrong, as a phrase, or None if nothing is."""
    draws = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(_SMALL, _SMALL, generator=draws).to(device, torch.bfloat16) for _ in range(3))
    cols = torch.arange(_SMALL, device=device)
    try:
        for call in range(4):  # two in Python, of which the second is recorded, and two replays
            keys = GradientKeys(1 + call, 2**63 + call, cols)
            found, expected = (_gemms(backend, x, w, g, keys) for backend in (replayed, python))
            if not all(map(torch.equal, found, expected)):
                return "C++ does not give the bits of Python on this device"
    except Exception as error:  # a run goes on in Python
        return f"C++ fails: {error}"[:200]
    return None


def _gemms(backend: HopperBackend, x: Tensor, w: Tensor, g: Tensor, keys: GradientKeys) -> list[Tensor]:
    fmt, out = Format.FP4, torch.ones(_SMALL, _SMALL, device=x.device)
    x_row, x_col = backend.quantize_input(x, fmt, fmt)
    w_row, w_col = backend.quantize_weight(w, fmt, fmt)
    g_row, g_col = backend.quantize_gradient(g, fmt, fmt, keys)
    y, d = backend.fprop(x_row, w_row, dtype=x.dtype), backend.dgrad(g_row, w_col, dtype=x.dtype)
    backend.wgrad(g_col, x_col, out=out)
    whole, kept = backend.forward(x, w_row, fmt, fmt)
    assert kept is not None
    return [y, d, whole, *backend.backward(g, w_col, kept, fmt, fmt, keys, out=out)]


def _split(keys: GradientKeys) -> tuple[tuple[int, ...], Random]:
    """Return the keys that are numbers, and the other arguments of stochastic rounding.

    Those are the keys with the numbers replaced, the columns, and whether they are pairs, on which the kernel depends.
    """
    dgrad, wgrad, cols, _ = keys
    if dgrad is None and wgrad is None:
        return (), (None, None, None, True)
    if isinstance(dgrad, int) and isinstance(wgrad, int):  # what follows gives the same in more time
        return (dgrad, wgrad), (_SEED, _SEED, cols, are_pairs(cols, 0))
    seeds = tuple(key for key in (dgrad, wgrad) if isinstance(key, int))
    first, second = (_SEED if isinstance(key, int) else key for key in (dgrad, wgrad))
    return seeds, (first, second, cols, are_pairs(cols, 0))


def _joined(seeds: Seeds, random: Random, first_row: int) -> GradientKeys:
    """Return the keys that :func:`_split` took apart."""
    *keys, cols, _ = random
    remaining = iter(seeds)
    dgrad, wgrad = (next(remaining) if isinstance(key, str) else key for key in keys)
    return GradientKeys(dgrad, wgrad, cols, first_row)

"""The calls of one linear of all experts of a layer that a calibration times: grouped GEMMs and their quantisation."""

import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from snip_megatron.numerics.products.backend import Formats, GemmBackend
from snip_megatron.numerics.quantize.formats import TILE
from snip_megatron.numerics.quantize.operands import GradientKeys, OperandPair, OperandSpec
from snip_megatron.precision import Format, Gemm
from snip_megatron.timing.calibration.clock import Clock
from snip_megatron.timing.calibration.workload import Size
from snip_megatron.timing.table import OPERANDS, Triple

_PAIRS = 256  # SwiGLU's kernels take whole tiles of gates and of ups
_LEAST = 1e-9  # seconds: two times that differ by less are equal
_UNEVEN = (0.7, 1.3)  # rows of an expert, of the mean
_READ: dict[Gemm, tuple[str, int]] = {Gemm.FPROP: ("input", 0), Gemm.DGRAD: ("gradient", 1)}
"""Product → the operand that it reads beside the weights, and the side of the weights."""


class GroupedLinear:
    """Times a linear of a size (experts, tokens of all experts, n, k).

    A round times one GEMM, or one quantisation, in all formats. Formats whose calls run expert by expert come last: the
    GPU may wait for their launches, which is part of their time, and of no other's.
    """

    def __init__(
        self,
        backend: GemmBackend,
        clock: Clock,
        formats: Sequence[Format],
        size: Size,
        normal: Callable[..., Tensor],
        keys: tuple[int, int],
    ) -> None:
        experts, tokens, n, k = size
        self._products = backend.grouped(n, k, torch.bfloat16)
        self._clock, self._normal, self._weights = clock, normal, (experts, n, k)
        self._splits = uneven_splits(experts, tokens, TILE if self._products.pads else 1)
        self._rows = {
            "input": normal(sum(self._splits), k),
            "gradient": normal(sum(self._splits), n, scale=1e-3),
        }
        self._keys = GradientKeys(*keys, torch.arange(n, device=clock.device), paired=True)
        one_launch = self._products.in_one_launch
        self._formats = sorted((Format.BF16, *formats), key=lambda fmt: fmt not in one_launch)
        self._quantised = [fmt for fmt in self._formats if fmt is not Format.BF16]

    def times(self) -> dict[str, dict[Format, Any]]:
        """Return what :attr:`snip_megatron.timing.table.TimingTable.grouped` has of a size."""
        matrices = list(self._normal(*self._weights, scale=self._weights[2] ** -0.5).unbind(0))
        weights = self._times(partial(self._quantise_weights, matrices), self._quantised)
        gemms = [self._times(partial(self._product, gemm, matrices), self._formats) for gemm in _READ]
        del matrices  # before the gradients take their memory
        gradients = list(torch.zeros(self._weights, device=self._clock.device).unbind(0))
        gemms.append(self._times(partial(self._wgrad, gradients), self._formats))
        found: dict[str, dict[Format, Any]] = {"gemms": _triples(gemms), "weights": weights}
        for operand in OPERANDS:
            sides = [(True, False), (False, True), (True, True)]
            found[operand] = _triples([self._times(partial(self._side, operand, *s), self._quantised) for s in sides])
            found[f"fused_{operand}"] = self._fused(operand, found[operand])
        return found

    def _fused(self, operand: str, apart: dict[Format, Triple]) -> dict[Format, float]:
        """Return what quantising for the first GEMM adds to SwiGLU, or to its gradient, with the other GEMM in bf16.

        Formats that are not fused have the times of a quantisation ``apart``.
        """
        rows, fuses = self._rows[operand], self._products.fuses_swiglu
        width = rows.shape[1] * (2 if operand == "input" else 1)
        formats = [fmt for fmt in self._formats if fuses((fmt, Format.BF16)) and width % _PAIRS == 0]
        found = {fmt: times[0] for fmt, times in apart.items()}
        if len(formats) < 2:
            return found
        y = self._normal(len(rows), width) if operand == "input" else rows
        d, probs = y[:, : y.shape[1] // 2].contiguous(), torch.ones(len(rows), device=rows.device)

        def call(fmt: Format) -> Callable[[], object]:
            if operand == "input":
                return partial(self._products.swiglu, y, probs, self._splits, OperandSpec(fmt, Format.BF16))
            spec = OperandSpec(fmt, Format.BF16, keys=self._keys)
            return partial(self._products.swiglu_gradient, d, y, probs, self._splits, spec)

        times = self._times(call, formats)
        return found | {fmt: max(s - times[Format.BF16], _LEAST) for fmt, s in times.items() if fmt in found}

    def _times(self, call: Callable[[Format], Callable[[], object]], formats: Sequence[Format]) -> dict[Format, float]:
        calls = {fmt: call(fmt) for fmt in formats}
        return self._clock.seconds({fmt: lambda _, run=run: run() for fmt, run in calls.items()})  # type: ignore[misc]

    def _quantise(self, operand: str, formats: Formats) -> OperandPair:
        keys = self._keys if operand == "gradient" else None
        return self._products.quantize_rows(self._rows[operand], self._splits, OperandSpec(*formats, keys=keys))

    def _quantise_weights(self, matrices: Sequence[Tensor], fmt: Format) -> Callable[[], OperandPair]:
        return partial(self._products.quantize_weights, matrices, OperandSpec(fmt, fmt, weight=True))

    def _product(self, gemm: Gemm, matrices: Sequence[Tensor], fmt: Format) -> Callable[[], Tensor]:
        operand, side = _READ[gemm]
        spec = OperandSpec(None if side else fmt, fmt if side else None, weight=True)
        weights = self._products.quantize_weights(matrices, spec)[side]
        rows, _ = self._quantise(operand, (fmt, None))
        return partial(self._products.multiply, gemm, rows, weights, torch.bfloat16)

    def _wgrad(self, gradients: Sequence[Tensor], fmt: Format) -> Callable[[], object]:
        (_, x), (_, g) = (self._quantise(operand, (None, fmt)) for operand in OPERANDS)
        return partial(self._products.accumulate, g, x, gradients)

    def _side(self, operand: str, rowwise: bool, columnwise: bool, fmt: Format) -> Callable[[], OperandPair]:
        return partial(self._quantise, operand, (fmt if rowwise else None, fmt if columnwise else None))


def uneven_splits(experts: int, tokens: int, multiple: int) -> list[int]:
    """Return rows of experts, 0.7 to 1.3 of the mean, each padded to a multiple of ``multiple`` as in training."""
    draws = random.Random(experts)
    shares = [draws.uniform(*_UNEVEN) for _ in range(experts)]
    ends = [round(tokens * end / sum(shares)) for end in itertools.accumulate(shares, initial=0.0)]
    return [-(-(end - start) // multiple) * multiple for start, end in itertools.pairwise(ends)]


def _triples(columns: Sequence[dict[Format, float]]) -> dict[Format, Triple]:
    first, second, third = columns
    return {fmt: (first[fmt], second[fmt], third[fmt]) for fmt in first}

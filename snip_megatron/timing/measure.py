"""What a calibration measures: clocks, and the calls of single linears, grouped linears, attention and copies."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.quantize.formats import TILE
from snip_megatron.numerics.quantize.operands import GradientKeys, OperandPair, OperandSpec
from snip_megatron.precision import Format, FormatPair, Gemm
from snip_megatron.timing.table import OPERANDS, Triple

Size = tuple[int, ...]  # tokens and features of what is measured, in the order of the table's keys
Call = Callable[[int], object]
"""A call to be timed. Its argument counts the calls, so that the call can rotate its buffers."""

_ROUNDS = (4, 24)
_SECONDS = 0.05  # total duration of a measurement, within the limits of _ROUNDS
_HEATER = 8192
_HEATINGS = 2


class Clock(Protocol):
    """A clock that times calls in turns."""

    device: torch.device

    def seconds[Key: Hashable](self, calls: Mapping[Key, Call]) -> dict[Key, float]:
        """Return the median seconds of each call over several rounds, after a warm-up."""


class HostClock:
    """The clock of a CPU."""

    device = torch.device("cpu")

    def seconds[Key: Hashable](self, calls: Mapping[Key, Call]) -> dict[Key, float]:
        times: dict[Key, list[float]] = {key: [] for key in calls}
        for turn in range(_ROUNDS[0]):
            for key, call in calls.items():
                started = time.perf_counter()
                call(turn)
                times[key].append(max(time.perf_counter() - started, 1e-9))
        return {key: _rounded(statistics.median(taken[1:])) for key, taken in times.items()}


class GpuClock:
    """The clock of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        generator = torch.Generator(device).manual_seed(0)  # a training's generator stays as it is
        self._a, self._b = (
            torch.randn(_HEATER, _HEATER, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(2)
        )
        self._out = torch.empty_like(self._a)

    def seconds[Key: Hashable](self, calls: Mapping[Key, Call]) -> dict[Key, float]:
        self._round(calls, 0)  # compiles kernels and lets libraries allocate
        torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        self._round(calls, 1)
        torch.cuda.synchronize(self.device)
        least, most = _ROUNDS
        rounds = min(most, max(least, int(_SECONDS / (time.perf_counter() - started))))
        taken = [self._round(calls, turn + 2) for turn in range(rounds)]
        torch.cuda.synchronize(self.device)
        return {
            key: _rounded(statistics.median(events[key][0].elapsed_time(events[key][1]) for events in taken) / 1e3)
            for key in calls
        }

    def _round[Key: Hashable](
        self, calls: Mapping[Key, Call], turn: int
    ) -> dict[Key, tuple[torch.cuda.Event, torch.cuda.Event]]:
        for _ in range(_HEATINGS):
            torch.mm(self._a, self._b, out=self._out)
        events = {}
        for place, (key, call) in enumerate(calls.items()):
            start, end = _event(), _event()
            start.record()
            call(turn + place)
            end.record()
            events[key] = (start, end)
        return events


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _rounded(seconds: float) -> float:
    """Round to five significant digits, which is finer than the repeatability."""
    return float(f"{seconds:.5g}")


def clock_for(device: torch.device) -> Clock:
    return HostClock() if device.type == "cpu" else GpuClock(device)


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

    def __init__(self, measurer: Measurer, size: Size) -> None:
        experts, tokens, n, k = size
        self._products = measurer.backend.grouped(n, k, torch.bfloat16)
        self._clock, self._normal, self._weights = measurer.clock, measurer.normal, (experts, n, k)
        self._splits = uneven_splits(experts, tokens, TILE if self._products.pads else 1)
        rows = sum(self._splits)
        self._rows = {"input": self._normal(rows, k), "gradient": self._normal(rows, n, scale=1e-3)}
        self._keys = measurer.keys(n)
        one_launch = self._products.in_one_launch
        self._formats = sorted((Format.BF16, *measurer.formats), key=lambda fmt: fmt not in one_launch)
        self._quantised = [fmt for fmt in self._formats if fmt is not Format.BF16]

    def times(self) -> dict[str, dict[Format, Any]]:
        """Return what :attr:`snip_megatron.timing.table.TimingTable.grouped` has of a size."""
        matrices = list(self._normal(*self._weights, scale=self._weights[2] ** -0.5).unbind(0))
        weights = self._times(partial(self._quantise_weights, matrices), self._quantised)
        gemms = [self._times(partial(self._product, gemm, matrices), self._formats) for gemm in _READ]
        del matrices  # before the gradients take their memory
        gradients = list(torch.zeros(self._weights, device=self._clock.device).unbind(0))
        gemms.append(self._times(partial(self._wgrad, gradients), self._formats))
        times: dict[str, dict[Format, Any]] = {"gemms": _triples(gemms), "weights": weights}
        for operand in OPERANDS:
            sides = [(True, False), (False, True), (True, True)]
            times[operand] = _triples([self._times(partial(self._side, operand, *s), self._quantised) for s in sides])
            times[f"fused_{operand}"] = self._fused(operand, times[operand])
        return times

    def _fused(self, operand: str, apart: dict[Format, Triple]) -> dict[Format, float]:
        """Return format → seconds that quantising for the first GEMM adds to SwiGLU or its gradient, with the other
        GEMM in bf16. A format that is not fused has the seconds of a quantisation ``apart``.
        """
        rows, fuses = self._rows[operand], self._products.fuses_swiglu
        width = rows.shape[1] * (2 if operand == "input" else 1)
        formats = [fmt for fmt in self._formats if fuses((fmt, Format.BF16)) and width % _PAIRS == 0]
        seconds = {fmt: times[0] for fmt, times in apart.items()}
        if len(formats) < 2:
            return seconds
        y = self._normal(len(rows), width) if operand == "input" else rows
        d, probs = y[:, : y.shape[1] // 2].contiguous(), torch.ones(len(rows), device=rows.device)

        def call(fmt: Format) -> Callable[[], object]:
            if operand == "input":
                return partial(self._products.swiglu, y, probs, self._splits, OperandSpec(fmt, Format.BF16))
            spec = OperandSpec(fmt, Format.BF16, keys=self._keys)
            return partial(self._products.swiglu_gradient, d, y, probs, self._splits, spec)

        times = self._times(call, formats)
        return seconds | {fmt: max(s - times[Format.BF16], _LEAST) for fmt, s in times.items() if fmt in seconds}

    def _times(self, call: Callable[[Format], Callable[[], object]], formats: Sequence[Format]) -> dict[Format, float]:
        calls = {fmt: call(fmt) for fmt in formats}
        return self._clock.seconds({fmt: lambda _, run=run: run() for fmt, run in calls.items()})  # type: ignore[misc]

    def _quantise(self, operand: str, formats: FormatPair) -> OperandPair:
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
    bounds = [round(tokens * end / sum(shares)) for end in itertools.accumulate(shares, initial=0.0)]
    return [-(-(end - start) // multiple) * multiple for start, end in itertools.pairwise(bounds)]


def _triples(columns: Sequence[dict[Format, float]]) -> dict[Format, Triple]:
    first, second, third = columns
    return {fmt: (first[fmt], second[fmt], third[fmt]) for fmt in first}


_COLD_BYTES = 256 << 20  # total size of rotating operands, several times larger than any cache
_MOST_SETS = 4
_COPIED = 1 << 30
_ATTENTION_TOKENS = 16384  # computed at once, because one short sequence with few heads does not fill a GPU
_KEYS = (1, 2)  # arbitrary keys of stochastic rounding


@dataclass
class Measurer:
    """Measures one size at a time, in the quantised ``formats``. The clock rate depends on the values of ``seed``."""

    backend: GemmBackend
    clock: Clock
    formats: tuple[Format, ...]
    seed: int = 1
    _generator: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator(device=self.clock.device).manual_seed(self.seed)

    # -- linears -------------------------------------------------------------------------------------------------
    def gemms(self, size: Size) -> dict[Format, Triple]:
        """Return format → seconds of fprop and dgrad (bf16 output) and wgrad (into FP32) of a size (tokens, n, k)."""
        m, n, k = size
        sets = [self._linear(m, n, k) for _ in range(_sets(2 * (m * n + m * k + n * k)))]
        calls = {(gemm, fmt): _rotating([prepared[fmt, gemm] for prepared in sets])
                 for gemm in Gemm for fmt in (Format.BF16, *self.formats)}  # fmt: skip
        times = self.clock.seconds(calls)
        return _triples([{fmt: times[gemm, fmt] for fmt in (Format.BF16, *self.formats)} for gemm in Gemm])

    def activations(self, size: Size) -> dict[str, dict[Format, Triple]]:
        """Time the quantisation of activations and gradients of a size (tokens, features). Returns operand → format →
        seconds of quantising for the first GEMM only, for wgrad only, and for both in one call.
        """
        m, features = size
        sets = [self.normal(m, features) for _ in range(_sets(2 * m * features))]
        keys = self.keys(features)
        calls: dict[tuple[str, Format, int], Call] = {}
        for fmt in self.formats:
            for side, pair in enumerate(((fmt, None), (None, fmt), (fmt, fmt))):
                quantise_x = [partial(self.backend.quantize, x, OperandSpec(*pair)) for x in sets]
                quantise_g = [partial(self.backend.quantize, x, OperandSpec(*pair, keys=keys)) for x in sets]
                calls["input", fmt, side] = _rotating(quantise_x)
                calls["gradient", fmt, side] = _rotating(quantise_g)
        times = self.clock.seconds(calls)
        columns = {o: [{fmt: times[o, fmt, side] for fmt in self.formats} for side in range(3)] for o in OPERANDS}
        return {operand: _triples(of_sides) for operand, of_sides in columns.items()}

    def weights(self, size: Size) -> dict[Format, float]:
        """Return format → seconds of quantising a weight (n, k) for fprop and dgrad in one call."""
        sets = [self.normal(*size) for _ in range(_sets(2 * size[0] * size[1]))]
        specs = {fmt: OperandSpec(fmt, fmt, weight=True) for fmt in self.formats}
        quantise = self.backend.quantize
        calls = {fmt: _rotating([partial(quantise, w, spec) for w in sets]) for fmt, spec in specs.items()}
        return self.clock.seconds(calls)

    def grouped(self, size: Size) -> dict[str, dict[Format, Any]]:
        """Time a linear of all experts of a size (experts, tokens, n, k)."""
        return GroupedLinear(self, size).times()

    def _linear(self, m: int, n: int, k: int) -> dict[tuple[Format, Gemm], Callable[[], object]]:
        """Quantise one set of operands in every format, and return the call of each format and GEMM."""
        x, w, g = self.normal(m, k), self.normal(n, k, scale=k**-0.5), self.normal(m, n, scale=1e-3)
        main_grad = torch.zeros(n, k, device=self.clock.device)
        keys = self.keys(n)
        calls: dict[tuple[Format, Gemm], Callable[[], object]] = {}
        for fmt in (Format.BF16, *self.formats):
            x_row, x_col = self.backend.quantize(x, OperandSpec(fmt, fmt))
            w_row, w_col = self.backend.quantize(w, OperandSpec(fmt, fmt, weight=True))
            g_row, g_col = self.backend.quantize(g, OperandSpec(fmt, fmt, keys=keys))
            calls[fmt, Gemm.FPROP] = partial(self.backend.multiply, Gemm.FPROP, x_row, w_row, torch.bfloat16)
            calls[fmt, Gemm.DGRAD] = partial(self.backend.multiply, Gemm.DGRAD, g_row, w_col, torch.bfloat16)
            calls[fmt, Gemm.WGRAD] = partial(self.backend.multiply, Gemm.WGRAD, g_col, x_col, torch.float32, main_grad)
        return calls

    # -- the rest of a step --------------------------------------------------------------------------------------
    def attention(self, size: Size) -> tuple[float, float]:
        """Time causal attention of a size (sequence, heads, head size) with the faster of torch's fused kernels (on a
        CPU, the unfused one). Returns the seconds of the forward and of the backward of one sequence.
        """
        kernels = [SDPBackend.MATH]
        if self.clock.device.type == "cuda":
            kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
        times: list[tuple[float, float]] = []
        for kernel in kernels:
            try:
                times.append(self._attention(size, kernel))
            except RuntimeError:  # this build or GPU does not have the kernel
                continue
        if not times:
            raise RuntimeError("torch has no fused attention here")
        return min(times, key=sum)

    def _attention(self, size: Size, kernel: SDPBackend) -> tuple[float, float]:
        sequence, heads, width = size
        batch = max(1, _ATTENTION_TOKENS // sequence) if self.clock.device.type == "cuda" else 1
        q, k, v = (self.normal(batch, heads, sequence, width).requires_grad_() for _ in range(3))
        gradient = self.normal(batch, heads, sequence, width)
        with sdpa_kernel([kernel]):
            forward = partial(scaled_dot_product_attention, q, k, v, is_causal=True)
            out = forward()
            backward = partial(torch.autograd.grad, out, (q, k, v), gradient, retain_graph=True)
            times = self.clock.seconds({"forward": lambda _: forward(), "backward": lambda _: backward()})
        return times["forward"] / batch, times["backward"] / batch

    def copy_rate(self) -> float:
        """Return the bytes read and written a second by a copy within device memory."""
        size = _COPIED if self.clock.device.type == "cuda" else 1 << 20
        source = torch.empty(size // 2, dtype=torch.uint8, device=self.clock.device)
        target = torch.empty_like(source)
        return size / self.clock.seconds({"copy": lambda _: target.copy_(source)})["copy"]

    def keys(self, features: int) -> GradientKeys:
        """Return keys of the stochastic rounding of a gradient [T, features]."""
        return GradientKeys(*_KEYS, torch.arange(features, device=self.clock.device), paired=True)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return normal numbers times ``scale``, bf16."""
        values = torch.randn(*shape, device=self.clock.device, dtype=torch.bfloat16, generator=self._generator)
        return values.mul_(scale)


def _rotating(calls: Sequence[Callable[[], object]]) -> Call:
    """Return a call that runs ``calls`` in turn. Each has its own buffers, so that caches do not help."""
    return lambda turn: calls[turn % len(calls)]()


def _sets(bytes_each: int) -> int:
    return min(_MOST_SETS, max(1, -(-_COLD_BYTES // max(bytes_each, 1))))

"""The calls that a calibration times: the package's own quantisers and GEMMs, attention, a copy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.quantize.operands import GradientKeys, OperandSpec
from snip_megatron.precision import Format, Gemm
from snip_megatron.timing.calibration.clock import Call, Clock
from snip_megatron.timing.calibration.grouped import GroupedLinear
from snip_megatron.timing.calibration.workload import Size
from snip_megatron.timing.table import OPERANDS, Triple

_COLD_BYTES = 256 << 20  # total size of rotating operands, several times larger than any cache
_MOST_SETS = 4
_COPIED = 1 << 30
_ATTENTION_TOKENS = 16384  # computed at once
_KEYS = (1, 2)  # arbitrary keys of stochastic rounding
_GEMMS = tuple(Gemm)


@dataclass
class Measurer:
    """Measures one size at a time, in the quantised ``formats``.

    ``seed`` is that of the operands' values, which matter because power, and so the clock rate, depends on them.
    """

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
        bytes_each = 2 * (m * n + m * k + n * k)
        sets = [self._linear(m, n, k) for _ in range(_sets(bytes_each))]
        formats = (Format.BF16, *self.formats)
        calls: dict[tuple[Format, int], Call] = {}
        for i, gemm in enumerate(_GEMMS):
            for fmt in formats:
                calls[fmt, i] = _rotating([prepared[fmt, gemm] for prepared in sets])
        times = self.clock.seconds(calls)
        return {fmt: (times[fmt, 0], times[fmt, 1], times[fmt, 2]) for fmt in formats}

    def activations(self, size: Size) -> dict[str, dict[Format, Triple]]:
        """Time the quantisation of activations and gradients of a size (tokens, features). Returns operand → format →
        seconds of quantising for the first GEMM only, for wgrad only, and for both in one call.
        """
        m, features = size
        sets = [self._normal(m, features) for _ in range(_sets(2 * m * features))]
        keys = GradientKeys(*_KEYS, torch.arange(features, device=self.clock.device), paired=True)
        calls: dict[tuple[str, Format, int], Call] = {}
        for fmt in self.formats:
            for side, pair in enumerate(((fmt, None), (None, fmt), (fmt, fmt))):
                quantise_x = [partial(self.backend.quantize, x, OperandSpec(*pair)) for x in sets]
                quantise_g = [partial(self.backend.quantize, x, OperandSpec(*pair, keys=keys)) for x in sets]
                calls["input", fmt, side] = _rotating(quantise_x)
                calls["gradient", fmt, side] = _rotating(quantise_g)
        times = self.clock.seconds(calls)
        return {
            operand: {
                fmt: (times[operand, fmt, 0], times[operand, fmt, 1], times[operand, fmt, 2]) for fmt in self.formats
            }
            for operand in OPERANDS
        }

    def weights(self, size: Size) -> dict[Format, float]:
        """Return format → seconds of quantising a weight (n, k) for fprop and dgrad in one call."""
        sets = [self._normal(*size) for _ in range(_sets(2 * size[0] * size[1]))]
        return self.clock.seconds(
            {
                fmt: _rotating([partial(self.backend.quantize, w, OperandSpec(fmt, fmt, weight=True)) for w in sets])
                for fmt in self.formats
            }
        )

    def grouped(self, size: Size) -> dict[str, dict[Format, Any]]:
        """Time a linear of all experts of a size (experts, tokens, n, k)."""
        return GroupedLinear(self.backend, self.clock, self.formats, size, self._normal, _KEYS).times()

    def _linear(self, m: int, n: int, k: int) -> dict[tuple[Format, Gemm], Callable[[], object]]:
        """Quantise one set of operands in every format, and return the call of each format and GEMM."""
        x, w, g = self._normal(m, k), self._normal(n, k, scale=k**-0.5), self._normal(m, n, scale=1e-3)
        main_grad = torch.zeros(n, k, device=self.clock.device)
        keys = GradientKeys(*_KEYS, torch.arange(n, device=self.clock.device), paired=True)
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

        On a GPU, 16,384 tokens are computed at once, because one short sequence with few heads does not fill it.
        """
        kernels = [SDPBackend.MATH]
        if self.clock.device.type == "cuda":
            kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
        found: list[tuple[float, float]] = []
        for kernel in kernels:
            try:
                found.append(self._attention(size, kernel))
            except RuntimeError:  # this build or GPU does not have the kernel
                continue
        if not found:
            raise RuntimeError("torch has no fused attention here")
        return min(found, key=sum)

    def _attention(self, size: Size, kernel: SDPBackend) -> tuple[float, float]:
        sequence, heads, width = size
        batch = max(1, _ATTENTION_TOKENS // sequence) if self.clock.device.type == "cuda" else 1
        q, k, v = (self._normal(batch, heads, sequence, width).requires_grad_() for _ in range(3))
        gradient = self._normal(batch, heads, sequence, width)
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

    def _normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        made = torch.randn(*shape, device=self.clock.device, dtype=torch.bfloat16, generator=self._generator)
        return made.mul_(scale)


def _rotating(calls: Sequence[Callable[[], object]]) -> Call:
    """Return a call that runs ``calls`` in turn. Each has its own buffers, so that caches do not help."""
    return lambda turn: calls[turn % len(calls)]()


def _sets(bytes_each: int) -> int:
    return min(_MOST_SETS, max(1, -(-_COLD_BYTES // max(bytes_each, 1))))

"""The names of Transformer Engine that the Blackwell backend uses, and nothing else of it: versions 2.9 to 2.20.

Transformer Engine calls the tiles along the last dimension of a matrix its *row-wise* usage, those along the first its
*column-wise* one. See blackwell.md.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from snip_megatron.precision import Format

NATIVE = (Format.NVFP4, Format.MXFP8)
"""Formats that this backend quantises and multiplies with Transformer Engine."""

ROW, COLUMN = "rowwise", "columnwise"


@dataclass(frozen=True)
class QuantizerKey:
    """What a quantizer of Transformer Engine is asked for.

    Attributes:
        format: nvfp4 or mxfp8.
        rowwise, columnwise: the usages wanted.
        square: nvfp4 in blocks of 16×16 (weights) instead of 1×16.
        stochastic: nvfp4 with stochastic rounding (gradients).
    """

    format: Format
    rowwise: bool
    columnwise: bool
    square: bool = False
    stochastic: bool = False

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``NVFP4Quantizer`` or, less the element's type, of ``MXFP8Quantizer``.

        No Hadamard transform: the statistics that choose the map know of none.
        """
        usages = {ROW: self.rowwise, COLUMN: self.columnwise}
        if self.format is Format.MXFP8:
            return usages
        return usages | {"with_2d_quantization": self.square, "stochastic_rounding": self.stochastic, "with_rht": False}


@dataclass(frozen=True)
class NativeOperand:
    """A matrix [rows, cols] in one usage, as a GEMM of Transformer Engine reads it.

    Attributes:
        format: nvfp4 or mxfp8.
        shape: without the padding.
        usage: "rowwise" or "columnwise".
        storage: the class that Transformer Engine keeps such a matrix in; None for an empty matrix, which is its own
            only tensor.
        fields: the arguments of that class that are no tensors, and the tensors of the other usage as None.
        names: of ``tensors``.
        tensors: bytes of the elements, bytes of the scales and, in nvfp4, the FP32 amax.
    """

    format: Format
    shape: tuple[int, int]
    usage: str
    storage: Callable[..., Any] | None
    fields: Mapping[str, Any] = field(repr=False)
    names: tuple[str, ...]
    tensors: tuple[Tensor, ...] = field(repr=False)

    def native(self) -> Any:
        """The operand as Transformer Engine's object."""
        assert self.storage is not None
        return self.storage(**self.fields, **dict(zip(self.names, self.tensors, strict=True)))


def one_usage(quantized: Any, usage: str, fmt: Format, shape: tuple[int, int]) -> NativeOperand:
    """One usage of a quantized matrix of Transformer Engine; the tensors of the other are not kept alive by it."""
    metadata = quantized.get_metadata()
    tensors = {name: value for name, value in metadata.items() if isinstance(value, Tensor)}
    mine = {name: value for name, value in tensors.items() if usage in name}
    # A GEMM does not look at the quantizer, and the class would copy it at every construction.
    fields = {name: None if name in tensors else value for name, value in metadata.items() if name not in mine}
    fields["quantizer"] = None
    return NativeOperand(fmt, shape, usage, type(quantized), fields, tuple(mine), tuple(mine.values()))


class TransformerEngine:
    """Quantisers and GEMM.

    Args:
        nvfp4: ``NVFP4Quantizer``.
        mxfp8: ``MXFP8Quantizer``, its element type given.
        general_gemm: the function of that name.
        quantize_with_amax: ``nvfp4_quantize_with_amax``; None before version 2.17.
        workspace: makes the GEMM's workspace where the function wants it handed over (2.9).
    """

    def __init__(
        self,
        nvfp4: Callable[..., Any],
        mxfp8: Callable[..., Any],
        general_gemm: Callable[..., Any],
        quantize_with_amax: Callable[..., Any] | None = None,
        workspace: Callable[[], Tensor] | None = None,
    ) -> None:
        self._classes = {Format.NVFP4: nvfp4, Format.MXFP8: mxfp8}
        self._general_gemm = general_gemm
        self._quantize_with_amax = quantize_with_amax
        self._workspace = workspace
        self._quantizers: dict[QuantizerKey, Any] = {}

    @property
    def takes_amax(self) -> bool:
        """Whether the amax of an nvfp4 tensor can be given: what shards of tensor parallel ranks need."""
        return self._quantize_with_amax is not None

    def quantize(self, x: Tensor, key: QuantizerKey, *, seed: int | None = None, amax: Tensor | None = None) -> Any:
        """Quantise ``x`` [rows, cols], both multiples of 32, contiguous.

        Args:
            seed: of stochastic rounding. Transformer Engine draws from CUDA's default generator; it is seeded for this
                call and put back, so draws depend on the seed and the place in ``x`` alone.
            amax: 0-dim FP32, of the whole tensor where ``x`` is a shard; used by nvfp4.
        """
        quantizer = self._quantizer(key)
        draws = _seeded(x.get_device(), seed) if key.stochastic and seed is not None else nullcontext()
        with draws, torch.no_grad():
            if amax is None or key.format is not Format.NVFP4:
                return quantizer(x)
            assert self._quantize_with_amax is not None, "availability() asks for it"
            amax = amax.to(torch.float32).reshape(1)
            return self._quantize_with_amax(x, quantizer, amax, amax)

    def _quantizer(self, key: QuantizerKey) -> Any:
        if key not in self._quantizers:
            quantizer = self._classes[key.format](**key.arguments())
            quantizer.internal = True  # plain storage: no tensor subclass, no autograd
            quantizer.optimize_for_gemm = True  # scales swizzled once, not in every GEMM (2.12 and later)
            self._quantizers[key] = quantizer
        return self._quantizers[key]

    def gemm(
        self, a: NativeOperand, b: NativeOperand, layout: str, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Products of A and B that Transformer Engine writes as a column-major library would.

        "TN": B·Aᵀ (fprop: W, X), "NN": B·A (dgrad: W, G), "NT": Bᵀ·A (wgrad: X, G).

        Args:
            dtype: bf16 or fp32.
            out: FP32, contiguous, to accumulate into; it is then also the result.
        """
        options: dict[str, Any] = {} if self._workspace is None else {"workspace": self._workspace()}
        result = self._general_gemm(
            a.native(),
            b.native(),
            layout=layout,
            out_dtype=dtype,
            out=out,
            accumulate=out is not None,
            grad=layout != "TN",
            use_split_accumulator=True,  # no fast accumulation: exact in FP32
            **options,
        )
        product: Tensor = result[0]
        return product


@contextmanager
def _seeded(device: int, seed: int) -> Iterator[None]:
    """The default generator of a CUDA device (-1: of the CPU) seeded; its state as it was afterwards, for dropout."""
    generator = torch.default_generator if device < 0 else torch.cuda.default_generators[device]
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


@functools.cache
def transformer_engine() -> TransformerEngine:
    """The installed one. Raises ImportError, or what else its import fails with."""
    import transformer_engine_torch as extension  # type: ignore[import-not-found]
    from transformer_engine.pytorch.cpp_extensions.gemm import general_gemm
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    workspace = None
    if "workspace" in inspect.signature(general_gemm).parameters:
        from transformer_engine.pytorch.module.base import get_workspace

        workspace = get_workspace
    return TransformerEngine(
        NVFP4Quantizer,
        functools.partial(MXFP8Quantizer, extension.DType.kFloat8E4M3),
        general_gemm,
        getattr(extension, "nvfp4_quantize_with_amax", None),
        workspace,
    )

"""The interface to Transformer Engine, versions 2.9 to 2.20, for the Blackwell backend.

No other module of the backend uses names of Transformer Engine. It calls tiles along the last dimension of a matrix the
*row-wise* usage, and tiles along the first dimension the *column-wise* usage. See blackwell.md.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snip_megatron.precision import Format

NATIVE = (Format.NVFP4, Format.MXFP8)
"""Formats of Transformer Engine's quantizers."""

ROW, COLUMN = "rowwise", "columnwise"


@dataclass(frozen=True)
class QuantizerKey:
    """The configuration of a quantizer of Transformer Engine.

    Attributes:
        format: nvfp4 or mxfp8.
        rowwise, columnwise: whether this usage is needed.
        square: whether nvfp4 uses blocks of 16×16 (for weights) instead of tiles of 1×16.
        stochastic: whether nvfp4 rounds stochastically (for gradients).
    """

    format: Format
    rowwise: bool
    columnwise: bool
    square: bool = False
    stochastic: bool = False

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of ``NVFP4Quantizer``, or of ``MXFP8Quantizer`` except its element type.

        The random Hadamard transform is off, because the statistics that choose the map do not model it.
        """
        usages = {ROW: self.rowwise, COLUMN: self.columnwise}
        if self.format is Format.MXFP8:
            return usages
        return usages | {"with_2d_quantization": self.square, "stochastic_rounding": self.stochastic, "with_rht": False}


class NativeOperand(NamedTuple):
    """A matrix [rows, cols] in one usage, as a GEMM of Transformer Engine reads it.

    Attributes:
        format: one of ``NATIVE``.
        usage: "rowwise" or "columnwise".
        storage: Transformer Engine's storage class for such a matrix. It is None for an empty matrix, whose only entry
            of ``tensors`` is the matrix itself.
        fields: the arguments of ``storage`` other than ``tensors``. The tensors of the other usage are None.
        names: argument names of ``tensors``.
        tensors: the bytes of the elements, the bytes of the scales and, in nvfp4, the FP32 amax.
    """

    format: Format
    shape: tuple[int, int]
    usage: str
    storage: Callable[..., Any] | None
    fields: Mapping[str, Any]
    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]

    def native(self) -> Any:
        """Return the operand as an object of Transformer Engine."""
        assert self.storage is not None
        return self.storage(**self.fields, **dict(zip(self.names, self.tensors, strict=True)))


def one_usage(quantized: Any, usage: str, fmt: Format, shape: tuple[int, int]) -> NativeOperand:
    """Return one usage of a matrix that Transformer Engine has quantised, without references to the other usage."""
    metadata = quantized.get_metadata()
    tensors = {name: value for name, value in metadata.items() if isinstance(value, Tensor)}
    mine = {name: value for name, value in tensors.items() if usage in name}
    # GEMMs do not read the quantizer, and the storage class would copy it at every construction.
    fields = {name: None if name in tensors else value for name, value in metadata.items() if name not in mine}
    fields["quantizer"] = None
    return NativeOperand(fmt, shape, usage, type(quantized), fields, tuple(mine), tuple(mine.values()))


class TransformerEngine:
    """Transformer Engine's quantizers and its GEMM.

    Args:
        nvfp4: ``NVFP4Quantizer``.
        mxfp8: ``MXFP8Quantizer`` with its element type bound.
        general_gemm: Transformer Engine's function of this name.
        quantize_with_amax: ``nvfp4_quantize_with_amax``; None before version 2.17.
        workspace: returns the workspace that ``general_gemm`` takes in version 2.9; None for later versions.
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
        """Whether the amax of an nvfp4 tensor can be passed in, which tensor parallelism requires."""
        return self._quantize_with_amax is not None

    def quantize(self, x: Tensor, key: QuantizerKey, *, seed: int | None = None, amax: Tensor | None = None) -> Any:
        """Quantise a matrix.

        Args:
            x: contiguous [rows, cols], both multiples of 32.
            key: the configuration of the quantizer.
            seed: seed of stochastic rounding. Transformer Engine draws from CUDA's default generator, which is seeded
                for this call and restored afterwards. Draws depend only on the seed and the position in ``x``.
            amax: 0-dim FP32 amax of the unsharded tensor if ``x`` is a shard. Only nvfp4 reads it.
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
            quantizer.internal = True  # returns the storage class instead of a tensor subclass with autograd
            quantizer.optimize_for_gemm = True  # swizzles scales once instead of in every GEMM (2.12 and later)
            self._quantizers[key] = quantizer
        return self._quantizers[key]

    def gemm(
        self, a: NativeOperand, b: NativeOperand, layout: str, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Multiply A and B. Transformer Engine names its layouts as a column-major library does.

        Args:
            a, b: the operands.
            layout: "TN" for B·Aᵀ (fprop with W, X), "NN" for B·A (dgrad with W, G), "NT" for Bᵀ·A (wgrad with X, G).
            dtype: dtype of the result, bf16 or fp32.
            out: contiguous FP32 tensor to accumulate into, which is then returned.
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
    """Seed the default generator of a CUDA device, or of the CPU if ``device`` is -1, and restore its state at exit."""
    generator = torch.default_generator if device < 0 else torch.cuda.default_generators[device]
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


@functools.cache
def transformer_engine() -> TransformerEngine:
    """Return the installed Transformer Engine. Raises ImportError, or any other exception that its import raises."""
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

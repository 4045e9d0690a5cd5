"""The interface of all GEMM backends, and the reference backend, which runs on any device.

A linear passes each of its matrices to the backend once: X in the forward, for fprop and wgrad; G in the backward, for
dgrad and wgrad; and W once per optimizer step, for fprop and dgrad. A backend can therefore quantise a matrix for both
GEMMs in one read. Matrices are 2-D: X [T, K], W [N, K], G [T, N]. how-it-works.md, "Formats", describes the formats.

The reference dequantises operands to FP32 and multiplies in FP32, so that the only error beside quantisation is that of
FP32 summation. All other backends are compared with it.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snip_megatron.numerics.products.grouped import GroupLoop
from snip_megatron.numerics.quantize import fake_quantize
from snip_megatron.numerics.quantize.kernels.replay import map_tuples
from snip_megatron.numerics.quantize.operands import CachedPair, ExactOperand, Operand, OperandPair, OperandSpec
from snip_megatron.precision import Format, FormatPair, Gemm


# -- operands, and how autograd saves them ---------------------------------------------------------------------------
class UnquantizedOperand(NamedTuple):
    """A matrix that the GEMM quantises. In bf16 it is not quantised."""

    tensor: Tensor  # [rows, cols] in the training dtype
    axis: int  # the dimension that the GEMM reduces over: 1 for the rowwise operand, 0 for the columnwise one
    spec: OperandSpec

    @property
    def format(self) -> Format | None:
        return self.spec.formats[1 - self.axis]


GemmOperand = UnquantizedOperand | Operand | ExactOperand
"""An operand of a GEMM. Both operands of a GEMM are of the same class."""


FlatOperand = tuple[tuple[Tensor, ...], Any]
"""A flattened operand: its tensors, which autograd can save, and the operand with ``...`` in their places."""


def flatten(operand: Any) -> FlatOperand:
    """Take an operand apart, so that autograd can save its tensors."""
    tensors: list[Tensor] = []

    def take(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return ...
        return value

    structure = map_tuples(operand, take)
    return tuple(tensors), structure


def assemble(flat: FlatOperand) -> Any:
    """Return the operand that :func:`flatten` took apart."""
    tensors = iter(flat[0])
    return map_tuples(flat[1], lambda value: next(tensors) if value is ... else value)


def restored(flat: FlatOperand) -> FlatOperand:
    """Return what autograd saved of an operand, with the scales of tiles in the layout of :class:`Operand`.

    Hooks of saved tensors, such as those that offload activations, bring a tensor back contiguous. Libraries read the
    memory of scales in columns, and would take contiguous scales for others.
    """
    tensors, structure = flat
    if type(structure) is not Operand or structure.scaling != "tile" or tensors[1].stride(0) == 1:
        return flat  # without a new operand: every backward of a quantised linear comes here
    return flatten(restored_operands(assemble(flat)))


def restored_operands(operands: Any) -> Any:
    """Return assembled operands of any nesting after :func:`restored`."""
    if isinstance(operands, Operand):
        if operands.scaling != "tile" or operands.scale.stride(0) == 1:
            return operands
        rows, tiles = operands.scale.shape
        # One column more: cuBLASLt reads the scales after the last ones, which it does not use.
        columns = operands.scale.new_empty((tiles + 1, rows)).t()[:, :tiles]
        return operands._replace(scale=columns.copy_(operands.scale))
    if isinstance(operands, tuple):
        return tuple.__new__(type(operands), [restored_operands(each) for each in operands])
    return operands


# -- the reference's products ------------------------------------------------------------------------------------
def numbers(operand: UnquantizedOperand | ExactOperand) -> Tensor:
    """Return the numbers that a GEMM multiplies: the matrix itself in bf16, otherwise Q of it in FP32."""
    if isinstance(operand, ExactOperand):
        return operand.dequantize()
    if operand.format is Format.BF16:
        return operand.tensor
    x, options = operand.spec.quantizer_arguments(operand.tensor, operand.axis)
    return fake_quantize(x, **options)


def unrounded(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` in FP32."""
    if left.is_cuda and left.dtype is not torch.float32 and left.numel():
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def add_product(g: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
    """Compute gᵀ·x in FP32. It is added to ``out`` if given.

    Products of bf16 numbers are exact in FP32. Accumulating in bf16 would lose most of a small gradient.
    """
    g, x = g.to(torch.float32), x.to(torch.float32)
    if out is not None and out.dtype is torch.float32:
        return out.addmm_(g.t(), x)
    product = g.t() @ x
    return product if out is None else out.add_(product)


# -- the interface ---------------------------------------------------------------------------------------------
class GemmBackend:
    """Quantisation and the three GEMMs of a linear.

    This base class is the reference backend. It keeps every operand in the training dtype until the GEMM, which
    quantises, dequantises and multiplies in plain torch. A faster backend overrides :meth:`quantize` and
    :meth:`multiply`. An operand in a format that it has no kernel for stays an :class:`UnquantizedOperand`, and this
    class multiplies it. The methods in ``REPLAYED`` are called with positional arguments alone.
    """

    name = "reference"
    products = ""  # the library that multiplies, if it depends on what this machine can load: DeepGEMM or cuBLASLt
    replayed: Mapping[str, Any] = MappingProxyType({})  # the methods whose calls C++ repeats
    fuses_swiglu = False  # whether :meth:`swiglu` has kernels

    def check(
        self, device: torch.device | str, formats: Collection[Format], sizes: Collection[tuple[int, int, int]] = ()
    ) -> str | None:
        """Check the optional libraries of this backend on ``device``, in ``formats``, and disable those that are wrong.

        Libraries are timed for linears of ``sizes``, (tokens, n, k), because none can be timed inside a CUDA graph.

        Returns what is wrong and what multiplies instead, or None. This base class has no optional library.
        """
        return None

    def disable_deepgemm(self) -> None:
        """Stop using DeepGEMM, if this backend does, because another rank cannot."""

    def swiglu_kernel(self, y: Tensor, formats: FormatPair) -> str | None:
        """Return what :meth:`swiglu` does beside SwiGLU of y [T, 2K] for operands in ``formats``: "quantize", "amax"
        (it computes the amax, which saves a read), or None if there is no kernel.
        """
        return None

    def swiglu(
        self, y: Tensor, d: Tensor | None, spec: OperandSpec | None, probs: Tensor | None = None
    ) -> tuple[Any, ...]:
        """Return SwiGLU [T, K] of y [T, 2K], gates first, or its gradient [T, 2K].

        Args:
            y: input. :meth:`swiglu_kernel` says which ``spec`` it may have.
            d: gradient of SwiGLU [T, K], contiguous. If it is None, SwiGLU itself is computed.
            spec: formats and keys for the quantisation of the result.
            probs: FP32 [T], only with ``spec``. The SwiGLU of each row is multiplied by its probability.

        Returns:
            With ``spec``, the two operands of the result and, for a gradient with ``probs``, the gradient of ``probs``.
            Without ``spec``, the result in y's dtype and its amax, FP32 and 0-dim.
        """
        raise NotImplementedError

    # -- one matrix, one product ---------------------------------------------------------------------------------
    def quantize(self, x: Tensor, spec: OperandSpec, cached: CachedPair | None = None) -> OperandPair:
        """Return a matrix as its rowwise and its columnwise operand, or write them to those of ``cached``."""
        if cached is not None:
            return cached.operands  # the weight itself
        plain = OperandSpec(spec.rowwise, spec.columnwise)
        row, col = (
            None if fmt is None else UnquantizedOperand(x, axis, plain if fmt is Format.BF16 else spec)
            for fmt, axis in zip(spec.formats, (1, 0), strict=True)
        )
        return row, col

    def multiply(
        self, gemm: Gemm, a: GemmOperand, b: GemmOperand, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """Compute one of the three products of a linear from the operands that :meth:`quantize` made.

        fprop: Y = Q(X)·Q(W)ᵀ [T, N]; dgrad: ∂L/∂X = Q(G)·Q(W) [T, K]; wgrad: ∇W = Q(G)ᵀ·Q(X) [N, K].

        Args:
            gemm: the product.
            a, b: its operands, (X, W), (G, W) or (G, X).
            dtype: dtype of the result. That of wgrad is FP32.
            out: tensor that wgrad is added to, and that is returned. A library may write fprop and dgrad to it. Without
                it, the result is in new memory.
        """
        assert not isinstance(a, Operand)
        assert not isinstance(b, Operand)
        left, right = numbers(a), numbers(b)
        if gemm is Gemm.WGRAD and isinstance(a, UnquantizedOperand) and a.format is Format.BF16:
            return self.accumulate_plain(left, right, out)
        if gemm is Gemm.WGRAD:
            return add_product(left, right, out)
        return (left @ (right.t() if gemm is Gemm.FPROP else right)).to(dtype)

    def accumulate_plain(self, g: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
        """Compute wgrad of unquantised G [T, N] and X [T, K]. A backend with a library adds inside the GEMM."""
        return add_product(g, x, out)

    def grouped(self, n: int, k: int, dtype: torch.dtype) -> GroupLoop:
        """Return the products of one linear of all experts of a layer, whose weights on this rank are [n, k]."""
        return GroupLoop(self.quantize, self.multiply)

    # -- what a linear runs between its collectives --------------------------------------------------------------
    def forward(self, x: Tensor, w: GemmOperand, spec: OperandSpec) -> tuple[Tensor, FlatOperand | None]:
        """Quantise X by ``spec`` and run fprop with ``w``, the rowwise operand of W.

        Returns:
            Y [..., N] in x's dtype, and X as the operand of wgrad, or None if wgrad does not run.
        """
        rowwise, columnwise = self.quantize(matrix(x), spec)
        y = unflattened(self.multiply(Gemm.FPROP, rowwise, w, x.dtype), x.shape[:-1])
        return y, None if columnwise is None else flatten(columnwise)

    def backward(
        self, g: Tensor, w: GemmOperand, x: FlatOperand, spec: OperandSpec, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Quantise G by ``spec``, and return ∂L/∂X [..., K] in g's dtype and ∇W.

        ``w`` is the columnwise operand of W, ``x`` what :meth:`forward` returned. ∇W is added to ``out`` if given.
        """
        rowwise, columnwise = self.quantize(matrix(g).contiguous(), spec)
        d = unflattened(self.multiply(Gemm.DGRAD, rowwise, w, g.dtype), g.shape[:-1])
        return d, self.multiply(Gemm.WGRAD, columnwise, assemble(x), torch.float32, out)


def matrix(x: Tensor) -> Tensor:
    """Return x [..., cols] as a matrix [rows, cols]."""
    return x.reshape(-1, x.shape[-1])


def unflattened(y: Tensor, leading: Sequence[int]) -> Tensor:
    """Return the matrix y [rows, cols] as [*leading, cols].

    It is no view for autograd, which forbids changes in place of a view that a function returns.
    """
    return torch.ops.aten._unsafe_view(y, (*leading, y.shape[-1]))  # type: ignore[no-any-return]


REFERENCE = GemmBackend()
REPLAYED = ("quantize", "multiply", "swiglu", "forward", "backward")  # the methods of a backend that compute

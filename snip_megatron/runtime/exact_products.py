"""The inputs of a linear's GEMMs in one microbatch, and their products by the reference's numerics.

The reference shares nothing with the job's backends but torch's quantisers, so that a fault of theirs is not its own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from snip_megatron.layers.autograd import LinearCall, PrequantizedTensor, gradient_keys
from snip_megatron.layers.context import LinearHandle
from snip_megatron.numerics.products.backend import FlatOperand, GemmBackend, UnquantizedOperand, matrix
from snip_megatron.numerics.products.grouped import GroupLoop
from snip_megatron.numerics.quantize.operands import CachedPair, OperandPair, OperandSpec
from snip_megatron.numerics.quantize.reference import fake_quantize
from snip_megatron.precision import Format, Formats, Gemm

FormatsOf = Callable[[LinearHandle], Formats]

_all_gather = dist.all_gather  # what a job replaces later is not what checks it


class ExactBackend(GemmBackend):
    """The reference's numerics, by functions that the job's backends do not use: torch's quantisers, FP32 products."""

    name = "exact"

    def of(self, handle: LinearHandle, *, after_backward: bool = False) -> "ExactBackend":
        """Return the numerics of one linear. ``after_backward`` says that its backward has been counted already."""
        return self

    def start_pass(self) -> None:
        """Forget what an earlier pass left."""

    def quantize(self, x: Tensor, spec: OperandSpec, cached: CachedPair | None = None) -> OperandPair:
        row, col = (
            None if fmt is None else UnquantizedOperand(x, axis, spec)
            for fmt, axis in zip(spec.formats, (1, 0), strict=True)
        )
        return row, col

    def numbers(self, operand: UnquantizedOperand) -> Tensor:
        """Return the numbers that the GEMM multiplies, in FP32."""
        if operand.format is Format.BF16:
            return operand.tensor.float()
        x, options = operand.spec.quantizer_arguments(operand.tensor, operand.axis)
        return fake_quantize(x, **options)

    def multiply(self, gemm: Gemm, a: Any, b: Any, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        left, right = self.numbers(a), self.numbers(b)
        product = {Gemm.FPROP: lambda: left @ right.t(), Gemm.DGRAD: lambda: left @ right}.get(
            gemm, lambda: left.t() @ right
        )()
        return product.to(dtype) if out is None else out.add_(product)

    def forward(self, x: Tensor, w: Any, spec: OperandSpec) -> tuple[Tensor, FlatOperand | None]:
        return GEMM_METHODS[0](self, x, w, spec)  # type: ignore[no-any-return]

    def backward(self, g: Tensor, w: Any, x: FlatOperand, spec: OperandSpec, out: Tensor | None) -> Any:
        return GEMM_METHODS[1](self, g, w, x, spec, out)

    def grouped(self, n: int, k: int, dtype: torch.dtype) -> GroupLoop:
        return _ExactGroups(self.quantize, self.multiply)


GEMM_METHODS: Any = GemmBackend.forward, GemmBackend.backward


class _ExactGroups(GroupLoop):
    """The loop over experts, by functions that were bound when this module was imported."""

    quantize_rows, quantize_weights = GroupLoop.quantize_rows, GroupLoop.quantize_weights
    multiply, accumulate = GroupLoop.multiply, GroupLoop.accumulate


EXACT = ExactBackend()


class Product:
    """One linear in one microbatch: its inputs, as autograd passed them.

    Attributes:
        formats: Formats of (fprop, dgrad, wgrad) of the job.
        weight: The local shard of the weight, from the parameter.
        g: G [T, N] with all tokens. None in the forward.
        expert: Index of the expert among those of this rank. None if there is none.
        summed: The GEMM whose result the linear sums over tensor parallel ranks. None if there is none.
        parts: The parts of all tensor parallel ranks of the latest product, if it is their sum.
        redraws: Whether the job's kernels may round gradients by other random numbers than the reference.
    """

    redraws = False

    def __init__(self, call: LinearCall, x: Tensor, weight: Tensor, formats: Formats) -> None:
        self.call, self.formats, self.weight = call, formats, weight.detach()
        self.g: Tensor | None = None
        self.parts: list[Tensor] = []
        self._x = x
        self._g_spec: OperandSpec | None = None
        handle, sums_gradients = call.handle, call.sequence_parallel or call.allreduce_dgrad
        is_row = handle.parallel == "row" and handle.tp_size > 1 and handle.expert is None
        self.summed = Gemm.FPROP if is_row else Gemm.DGRAD if sums_gradients else None

    @property
    def handle(self) -> LinearHandle:
        return self.call.handle

    def x(self) -> Tensor:
        """Return X [T, K] with all tokens. Collective of tensor parallel ranks under sequence parallelism."""
        x = self._x
        if isinstance(x, PrequantizedTensor):
            x = x.source()  # type: ignore[attr-defined]
        return matrix(torch.cat(of_ranks(x, self.call.tp_group)) if self.call.sequence_parallel else x.detach())

    def start_backward(self, g: Tensor) -> None:
        """Note G. Collective of tensor parallel ranks as :meth:`x`."""
        call = self.call
        if isinstance(g, PrequantizedTensor):
            g = g.source()  # type: ignore[attr-defined]
        g = matrix(torch.cat(of_ranks(g, call.tp_group)) if call.reduce_scatter else g.detach()).contiguous()
        _, dgrad, wgrad = self.formats
        keys = gradient_keys(call, g, dgrad, wgrad)
        self.g = g
        self._g_spec = self.handle.spec("g", g, dgrad, wgrad, keys)

    def operands(self, gemm: Gemm, formats: Formats | None = None) -> list[tuple[Tensor, OperandSpec, int]]:
        """Return both matrices of a GEMM, how each is quantised, and which dimension the GEMM reduces over.

        ``formats`` replaces those of the job.
        """
        fprop, dgrad, wgrad = formats or self.formats
        handle, g_spec = self.handle, self._g_spec
        if formats is not None and self.g is not None:
            g_spec = OperandSpec(dgrad, wgrad)
        if gemm is Gemm.FPROP:
            x = self.x()
            return [(x, handle.spec("x", x, fprop, None), 1), (self.weight, self._weight_spec(fprop, None), 1)]
        assert self.g is not None
        assert g_spec is not None
        if gemm is Gemm.DGRAD:
            return [(self.g, g_spec, 1), (self.weight, self._weight_spec(None, dgrad), 0)]
        x = self.x()
        return [(self.g, g_spec, 0), (x, handle.spec("x", x, None, wgrad), 0)]

    def _weight_spec(self, fprop: Format | None, dgrad: Format | None) -> OperandSpec:
        return self.handle.spec("w", self.weight, fprop, dgrad)

    def exact(self, gemm: Gemm, numerics: GemmBackend, formats: Formats | None = None) -> Tensor:
        """Return the product by the reference's numerics, in FP32."""
        return self.multiplied(gemm, self.operands(gemm, formats), numerics)

    def multiplied(
        self, gemm: Gemm, operands: Sequence[tuple[Tensor, OperandSpec, int]], numerics: GemmBackend
    ) -> Tensor:
        """Do the same for ``operands``, which :meth:`operands` has returned."""
        left, right = (numerics.quantize(x, spec)[1 - axis] for x, spec, axis in operands)
        return numerics.multiply(gemm, left, right, torch.float32)


def of_ranks(x: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return a tensor of every rank of a group, by another collective than the linears use."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    _all_gather(parts, x.detach().contiguous(), group=group)
    return parts


class Watcher:
    """Receives the GEMMs of a pass. It ignores those whose method a subclass leaves as it is.

    Attributes:
        formats_of: Returns the formats of the job.
    """

    def __init__(self, formats_of: FormatsOf) -> None:
        self.formats_of = formats_of

    def on_result(self, product: Product, gemm: Gemm, result: Tensor, before: Tensor | None, library: str) -> None:
        """Compare a result. That of wgrad has been added to ``before``, if given."""

    def on_gather(self, product: Product, x: Tensor) -> None:
        """Compare the tokens that a linear has gathered. Collective of tensor parallel ranks."""

    def on_backward(self, product: Product, gradient: Tensor) -> None:
        """Note a finished backward, and the gradient [rows, K] that it returned for the input."""

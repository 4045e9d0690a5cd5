"""The interface of all GEMM backends, and the reference backend, which runs on any device.

A linear passes each of its matrices to the backend once: X in the forward, for fprop and wgrad; G in the backward, for
dgrad and wgrad; and W once per optimizer step, for fprop and dgrad. A backend can therefore quantise a matrix for both
GEMMs in one read.

Matrices are 2-D: X [T, K], W [N, K], G [T, N]. The three GEMMs of a linear may have three formats, whose granularity is
given in docs/method.md, "Formats". A format of None means that the GEMM does not run. ``amax`` is max|·| of the
unsharded matrix, 0-dim FP32. It is required if the matrix is a shard and the format has one scale for the whole tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from snip_megatron.errors import SnipError
from snip_megatron.gemm import reference
from snip_megatron.gemm.operands import Apart, GradientKeys, HeldSides, Plain, Side, disassemble
from snip_megatron.gemm.parcels import Parcel, plain_parcel
from snip_megatron.precision import Format
from snip_megatron.quantization.hadamard import ROTATED, Rotation
from snip_megatron.quantization.rounding import Key

Sides = tuple[Any, Any]
"""The operands of the two GEMMs that read a tensor, each a :data:`Side`; None for a GEMM that does not run."""
Formats = tuple[Format | None, Format | None]
"""The formats of the two GEMMs that read a tensor."""


class GemmBackend:
    """Quantisation and the three GEMMs of a linear.

    This base class is the reference backend. It keeps every operand in the training dtype until the GEMM, which
    quantises, dequantises and multiplies in plain torch. It runs on any device and for any shape. A faster backend
    overrides :meth:`_quantize` and multiplies the operands that it has made. An operand in a format that it has no
    kernel for stays :class:`Plain`, and this class multiplies it.
    """

    name = "reference"
    fuses_swiglu = False
    """Whether there are kernels that quantise SwiGLU where it is computed."""

    def check_graphs(self) -> None:
        """Raise SnipError if CUDA graphs cannot capture the kernels of this backend. This base class never does."""

    def check_gathers(self, formats: Collection[Format]) -> None:
        """Raise SnipError if :meth:`pack` does not support one of ``formats``. This base class transforms no shards."""
        if turned := sorted(fmt.value for fmt in formats if fmt in ROTATED):
            raise SnipError(
                f"--snip-communication gather and all cannot be combined with {', '.join(turned)}: shards are not"
                " transformed before they are gathered so far; use --snip-communication bf16"
            )

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
        """Return X [T, K] as the operands of fprop (tiles along K) and of wgrad (tiles along T).

        Args:
            x: X [T, K] in the training dtype.
            fprop, wgrad: formats of the two GEMMs; None if a GEMM does not run.
            amax: see the module.
            rotation: how the operand of wgrad is transformed if ``wgrad`` has a Hadamard transform. None: with the key
                0.
        """
        return self._quantize(x, (fprop, wgrad), amax, rotation=rotation)

    def quantize_weight(
        self,
        w: Tensor,
        fprop: Format | None,
        dgrad: Format | None,
        *,
        amax: Tensor | None = None,
        held: HeldSides | None = None,
    ) -> Sides:
        """Return W [N, K] as the operands of fprop (reduction along K) and of dgrad (reduction along N).

        Args:
            w: W [N, K] in the training dtype.
            fprop, dgrad: formats of the two GEMMs; None if a GEMM does not run.
            amax: see the module.
            held: operands of an earlier call. They are overwritten and returned, and no new memory is allocated.
        """
        if held is None:
            return self._quantize(w, (fprop, dgrad), amax, weight=True)
        self._renew(w, (fprop, dgrad), amax, held)
        return held.sides

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
        """Return G [T, N] as the operands of dgrad (tiles along N) and of wgrad (tiles along T).

        Args:
            g: G [T, N] in the training dtype.
            dgrad, wgrad: formats of the two GEMMs; None if a GEMM does not run.
            keys: keys of stochastic rounding, for the formats that use it.
            amax: see the module.
            rotation: as in :meth:`quantize_input`, with the same signs.
        """
        both = (keys.dgrad, keys.wgrad)
        return self._quantize(
            g, (dgrad, wgrad), amax, keys=both, cols=keys.cols, first_row=keys.first_row, rotation=rotation
        )

    def quantizes_swiglu(self, y: Tensor, formats: Formats) -> bool:
        """Return whether the two functions below take y [T, 2K] and these formats of the operands. None: no operand."""
        return False

    def quantize_swiglu(self, y: Tensor, fprop: Format | None, wgrad: Format | None) -> Sides:
        """Return SwiGLU [T, K] of y [T, 2K], gates first, as :meth:`quantize_input` does.

        Requires :meth:`quantizes_swiglu`.
        """
        raise NotImplementedError

    def quantize_swiglu_gradient(
        self, d: Tensor, y: Tensor, dgrad: Format | None, wgrad: Format | None, keys: GradientKeys
    ) -> Sides:
        """Return the gradient [T, 2K] of SwiGLU of y as :meth:`quantize_gradient` does. ``d`` [T, K] is contiguous.

        Requires :meth:`quantizes_swiglu`.
        """
        raise NotImplementedError

    def finds_amax_of_swiglu(self, y: Tensor, formats: Formats) -> bool:
        """Return whether the two functions below take y [T, 2K] and spare these formats a read for the amax."""
        return False

    def swiglu_with_amax(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return SwiGLU [T, K] of y [T, 2K], gates first, and its amax for :meth:`quantize_input`, FP32 and 0-dim.

        Requires :meth:`finds_amax_of_swiglu`.
        """
        raise NotImplementedError

    def swiglu_gradient_with_amax(self, d: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient [T, 2K] of SwiGLU of y, and its amax for :meth:`quantize_gradient`, FP32 and 0-dim.

        ``d`` [T, K] is contiguous. Requires :meth:`finds_amax_of_swiglu`.
        """
        raise NotImplementedError

    def pack(self, side: Side, format: Format, axis: int) -> Parcel:
        """Return an operand of a token shard of X or G as the bytes in which tensor parallel ranks gather it.

        Args:
            side: the operand, as :meth:`quantize_input` or :meth:`quantize_gradient` made it. Its tokens are a multiple
                of 128, and its amax is that of all shards.
            format: its format.
            axis: the dimension that its GEMM reduces over: 0 for tokens (wgrad), otherwise 1.
        """
        return plain_parcel(_plain(side), axis)

    def _quantize(
        self,
        x: Tensor,
        formats: Formats,
        amax: Tensor | None,
        *,
        weight: bool = False,
        keys: tuple[Key | None, Key | None] = (None, None),
        cols: Tensor | None = None,
        first_row: int = 0,
        rotation: Rotation | None = None,
    ) -> Sides:
        """Return x as the operands of the GEMM that reduces over its columns and of the one that reduces over its rows.

        Args:
            x: the matrix, in the training dtype.
            formats: formats of the two GEMMs.
            amax: see the module.
            weight: whether to quantise in blocks instead of tiles.
            keys: keys of stochastic rounding of the two GEMMs.
            cols: global indices of x's columns, which stochastic rounding reads.
            first_row: global index of x's first row, likewise.
            rotation: how the second operand is transformed if its format has a Hadamard transform.
        """

        def plain(fmt: Format | None, key: Key | None, axis: int) -> Plain | None:
            if fmt is None or fmt is Format.BF16:  # bf16 is not rounded
                return None if fmt is None else Plain(x, fmt)
            return Plain(x, fmt, key, cols, amax, first_row, rotation=None if axis else rotation)

        return plain(formats[0], keys[0], 1), plain(formats[1], keys[1], 0)

    def _renew(self, w: Tensor, formats: Formats, amax: Tensor | None, held: HeldSides) -> None:
        """Quantise W into the operands of ``held``. Plain operands are the weight itself and need no update."""

    # -- products ------------------------------------------------------------------------------------------------
    def fprop(self, x: Side, w: Side, *, dtype: torch.dtype) -> Tensor:
        """Return Y = Q(X)·Q(W)ᵀ [T, N] in ``dtype``."""
        x, w = _plain(x), _plain(w)
        return reference.fprop(
            x.tensor,
            w.tensor,
            x.format,
            amax=(x.amax, w.amax),
            quantised=(x.quantised, w.quantised),
            out_dtype=dtype,
        )

    def dgrad(self, g: Side, w: Side, *, dtype: torch.dtype) -> Tensor:
        """Return ∂L/∂X = Q(G)·Q(W) [T, K] in ``dtype``."""
        g, w = _plain(g), _plain(w)
        return reference.dgrad(
            g.tensor,
            w.tensor,
            g.format,
            seed=g.seed,
            offset=(g.first_row, 0),
            cols=g.cols,
            amax=(g.amax, w.amax),
            quantised=(g.quantised, w.quantised),
            out_dtype=dtype,
        )

    def wgrad(self, g: Side, x: Side, *, out: Tensor | None) -> Tensor:
        """Return ∇W = Q(G)ᵀ·Q(X) [N, K] in FP32. If ``out`` is given, ∇W is added to it and ``out`` is returned."""
        g, x = _plain(g), _plain(x)
        return reference.wgrad(
            g.tensor,
            x.tensor,
            g.format,
            seed=g.seed,
            offset=(g.first_row, 0),
            cols=g.cols,
            amax=(g.amax, x.amax),
            rotation=(g.rotation, x.rotation),
            quantised=(g.quantised, x.quantised),
            out=out,
        )

    # -- what a linear runs between its collectives --------------------------------------------------------------
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
        """Quantise X and run fprop.

        Args:
            x: X [..., K] in the training dtype.
            w: the operand of fprop that :meth:`quantize_weight` returned.
            fprop, wgrad, amax, rotation: the arguments of :meth:`quantize_input`.

        Returns:
            Y [..., N] in x's dtype, which is no view for autograd, and X as the operand of wgrad, taken apart; None for
            a wgrad that does not run.
        """
        row, col = self.quantize_input(matrix(x), fprop, wgrad, amax=amax, rotation=rotation)
        y = unflattened(self.fprop(row, w, dtype=x.dtype), x.shape[:-1])
        return y, None if col is None else disassemble(col)

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
        """Quantise G and run dgrad.

        Args:
            g: G [..., N] in the training dtype.
            w: the operand of dgrad that :meth:`quantize_weight` returned.
            dgrad, wgrad, keys, amax, rotation: the arguments of :meth:`quantize_gradient`.

        Returns:
            ∂L/∂X [..., K] in g's dtype, and G as the operand of wgrad.
        """
        row, col = self.quantize_gradient(matrix(g).contiguous(), dgrad, wgrad, keys, amax=amax, rotation=rotation)
        return unflattened(self.dgrad(row, w, dtype=g.dtype), g.shape[:-1]), col

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
        """Quantise G and run dgrad and wgrad.

        Args:
            x: the operand of wgrad that :meth:`forward` returned.
            out: see :meth:`wgrad`.
            g, w, dgrad, wgrad, keys, amax, rotation: the arguments of :meth:`input_gradient`.

        Returns:
            ∂L/∂X [..., K] in g's dtype, and ∇W as :meth:`wgrad` returns it.
        """
        d, col = self.input_gradient(g, w, dgrad, wgrad, keys, amax=amax, rotation=rotation)
        tensors, assemble = x
        return d, self.wgrad(col, assemble(*tensors), out=out)


def matrix(x: Tensor) -> Tensor:
    """Return x [..., cols] as a matrix [rows, cols]."""
    return x.reshape(-1, x.shape[-1])


def unflattened(y: Tensor, leading: Sequence[int]) -> Tensor:
    """Return the matrix y [rows, cols] as [*leading, cols].

    It is no view for autograd, which forbids changes in place of a view that a function returns.
    """
    return torch.ops.aten._unsafe_view(y, (*leading, y.shape[-1]))  # type: ignore[no-any-return]


def refuse_gathers(backend: str, formats: Collection[Format]) -> None:
    """Raise SnipError if one of ``formats`` is quantised, for a backend whose operands are not gathered."""
    if quantised := sorted(fmt.value for fmt in formats if fmt is not Format.BF16):
        raise SnipError(
            f"--snip-communication gather and all cannot be combined with {', '.join(quantised)} on the {backend}"
            " GEMMs, whose operands are not gathered so far; use --snip-communication bf16"
        )


def _plain(side: Side) -> Plain:
    """Return ``side``, which is a plain operand. Both operands of a GEMM are of the same kind."""
    assert isinstance(side, Plain)
    return side


REFERENCE = GemmBackend()

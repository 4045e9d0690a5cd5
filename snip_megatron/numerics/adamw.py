# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""One step of AdamW for many parameters in one launch, in Triton: clipping, update, and the copy into the model.

Libraries launch kernels of at most 320 blocks, which share a Hopper GPU's 132 multiprocessors unevenly, and read and
write gradients, parameters and moments once for each of the three. The operations and their rounding are those of
Transformer Engine's ``multi_tensor_adam`` on sm_90, so that the results have its bits.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from snip_megatron.numerics.quantize.kernels.launch import launch

_BLOCK = 2048


@triton.jit
def _mul(a, b, GPU: tl.constexpr):
    if GPU:
        return tl.inline_asm_elementwise("mul.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, True, 1)
    return a * b


@triton.jit
def _add(a, b, GPU: tl.constexpr):
    if GPU:
        return tl.inline_asm_elementwise("add.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, True, 1)
    return a + b


@triton.jit
def _fma(a, b, c, GPU: tl.constexpr):
    if GPU:
        return tl.inline_asm_elementwise("fma.rn.ftz.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], tl.float32, True, 1)
    return a * b + c


@triton.jit
def _reciprocal(x, GPU: tl.constexpr):
    if GPU:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return 1.0 / x


@triton.jit
def _root(x, GPU: tl.constexpr):
    if GPU:
        return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return tl.sqrt(x)


@triton.jit
def _vector(address, begin, dtype: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    pointers = address.to(tl.pointer_type(dtype)) + begin + tl.arange(0, BLOCK)
    # Four numbers a thread, also in bf16, so that all matrices have one layout.
    return tl.multiple_of(pointers, 4 * dtype.primitive_bitwidth // 8) if ALIGNED else pointers


_SCALARS = ("tensors", "minus_lr", "beta1", "beta2", "rest1", "rest2", "correction1", "correction2", "eps", "decay")


@triton.jit(do_not_specialize=_SCALARS)
def adamw_kernel(
    table_ptr, blocks_ptr, clip_ptr, tensors, minus_lr, beta1, beta2, rest1, rest2, correction1, correction2, eps,
    decay, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Update one block of one parameter. ``table`` and ``blocks`` are those of :class:`AdamW`."""
    program = tl.program_id(0)
    row = table_ptr + tl.load(blocks_ptr + 2 * program)
    begin = tl.load(blocks_ptr + 2 * program + 1).to(tl.int64) * BLOCK
    size = tl.minimum(tl.load(row + 5 * tensors) - begin, BLOCK).to(tl.int32)
    if ALIGNED:
        size = tl.multiple_of(size, 8)
    inside = tl.arange(0, BLOCK) < size
    gradient = _vector(tl.load(row), begin, tl.float32, BLOCK, ALIGNED)
    master = _vector(tl.load(row + tensors), begin, tl.float32, BLOCK, ALIGNED)
    mean = _vector(tl.load(row + 2 * tensors), begin, tl.float32, BLOCK, ALIGNED)
    square = _vector(tl.load(row + 3 * tensors), begin, tl.float32, BLOCK, ALIGNED)
    g = _mul(tl.load(gradient, inside, other=0.0), tl.load(clip_ptr), GPU)
    p = tl.load(master, inside, other=0.0)
    m = _fma(tl.load(mean, inside, other=0.0), beta1, _mul(g, rest1, GPU), GPU)
    v = _fma(tl.load(square, inside, other=0.0), beta2, _mul(_mul(g, rest2, GPU), g, GPU), GPU)
    scale1, scale2 = _reciprocal(correction1, GPU), _reciprocal(correction2, GPU)
    spread = _add(_root(_mul(v, scale2, GPU), GPU), eps, GPU)
    update = _fma(p, decay, _mul(_mul(m, scale1, GPU), _reciprocal(spread, GPU), GPU), GPU)
    p = _fma(update, minus_lr, p, GPU)
    tl.store(master, p, inside)
    tl.store(mean, m, inside)
    tl.store(square, v, inside)
    model = tl.load(row + 4 * tensors)
    if model != 0:
        tl.store(_vector(model, begin, tl.bfloat16, BLOCK, ALIGNED), p.to(tl.bfloat16), inside)


class AdamW:
    """The parameters of a group, and what one step of AdamW reads and writes, which must stay where it is.

    Args:
        gradients, parameters, means, squares: FP32 tensors of equal sizes, contiguous, on one GPU: gradients, the
            parameters that are updated, and the first and second moments.
        models: where the updated parameters are written in bf16, or None.
    """

    def __init__(
        self,
        gradients: Sequence[Tensor],
        parameters: Sequence[Tensor],
        means: Sequence[Tensor],
        squares: Sequence[Tensor],
        models: Sequence[Tensor | None],
    ) -> None:
        sizes = np.array([each.numel() for each in parameters], dtype=np.int64)
        columns = (gradients, parameters, means, squares, models)
        addresses = [[0 if each is None else each.data_ptr() for each in column] for column in columns]
        table = np.array([*addresses, sizes], dtype=np.int64)
        self._aligned = not (table[:5] % 16).any() and not (sizes % 8).any()
        blocks = -(-sizes // _BLOCK)
        numbers = np.arange(blocks.sum()) - np.repeat(blocks.cumsum() - blocks, blocks)
        pairs = np.stack((np.repeat(np.arange(len(sizes)), blocks), numbers), axis=1).astype(np.int32)
        device = parameters[0].device
        self._table, self._blocks = torch.from_numpy(table).to(device), torch.from_numpy(pairs).to(device)

    def step(
        self,
        clip: Tensor,
        step: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        decay: float,
        *,
        corrects: bool,
    ) -> None:
        """Run the step with the number ``step``, counted from 1.

        Args:
            clip: FP32 [1] on the GPU, by which the gradients are multiplied first. They are not changed.
            lr, betas, eps, decay: the learning rate, the decay of the moments, what is added to the root of the second
                moment, and the weight decay.
            corrects: whether the bias of the moments, which start from zero, is corrected.
        """
        rounded = [np.float32(beta) for beta in betas]
        rests = [np.float32(1) - beta for beta in rounded]
        corrections = [np.float32(1 - float(beta) ** step) if corrects else 1.0 for beta in rounded]
        launch(
            adamw_kernel, (len(self._blocks), 1), (self._table, self._blocks, clip), (),
            (self._table.shape[1], *map(float, (-lr, *rounded, *rests, *corrections, eps, decay))),
            {
                "BLOCK": _BLOCK, "ALIGNED": self._aligned,
                "GPU": self._table.is_cuda and not triton.knobs.runtime.interpret,
            },
            {"num_warps": 4},
        )  # fmt: skip

"""Apex's extension of this name, by cuBLASLt: Megatron's linears add weight gradients to ``main_grad`` in their GEMM.

``python -m benchmarks.job --fused-accumulation`` puts this folder on the path of its trainings. Without the extension,
Megatron's layers write every weight gradient in bf16 and add it in another kernel.
"""

from __future__ import annotations

from torch import Tensor

from snip_megatron.numerics.products.cublaslt import cublaslt


def wgrad_gemm_accum_fp32(x: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Compute main_grad += grad_outputᵀ·x.

    Args:
        x, grad_output: bf16 [T, K] and [T, N].
        main_grad: FP32 [N, K].

    Raises:
        RuntimeError: cuBLASLt is missing or has no kernel for these matrices.
    """
    library = cublaslt()
    operands = grad_output.contiguous(), x.contiguous(), main_grad.dtype
    if library is None or library.multiply(*operands, transposed=(True, False), out=main_grad, add=True) is None:
        raise RuntimeError("cuBLASLt has no kernel that accumulates")

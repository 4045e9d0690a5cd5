"""Block-scaled products by DeepGEMM, an optional library that is faster than cuBLASLt at most sizes on Hopper.

It compiles each kernel with nvcc at first use, unless :mod:`numerics.quantize.kernels.compiler` has done so before, and
keeps it in a cache on disk. The results of its fprop and dgrad are bitwise those of cuBLASLt, which runs wgrad.
"""

import functools
import importlib.util
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from snip_megatron.numerics.products.cublaslt import CublasLt
from snip_megatron.numerics.quantize.formats import TILE
from snip_megatron.numerics.quantize.kernels.launch import listings, recording
from snip_megatron.numerics.quantize.kernels.replay import run_opaque
from snip_megatron.numerics.quantize.operands import Operand, OperandSpec, quantize_operands
from snip_megatron.precision import Format
from snip_megatron.precision.errors import installed_version

DISTRIBUTION, VERSION = "sgl-deep-gemm", "0.1.4"
TORCH = (2, 11)
"""The release of torch that ``VERSION`` was built for. Later releases of the library misread tensors of this torch."""

_BY_BLOCKS = (1, 128, 128)
_SMALL = 256  # rows, columns and reduction of the product that is compared before the first use
_MOST_SIZES = 1024  # largest number of sizes that are timed. The rows of experts differ from step to step
_ROUNDS, _SLEEP = 3, 500_000  # of the timing; cycles, a quarter of a millisecond
_EXPERT_ROWS = 16384
"""Rows of experts from which on their number does not matter for the kernel, with 768 to 7,168 features."""
Gemm = Callable[..., None]


def run(gemm: Gemm, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], out: Tensor, *experts: Tensor) -> None:
    """Write the product of a [rows, K] in tiles and b in blocks to ``out``. ``experts``: the expert of every row.

    While kernels are listed, nothing runs, and the kernel for the training's number of rows is listed.
    """
    gemm = partial(gemm, disable_ue8m0_cast=True)
    if not listings:
        run_opaque(gemm, a, b, out, *experts)
        return
    from snip_megatron.numerics.quantize.kernels.compiler import missing_source

    values, scale = a
    listing = listings[-1]
    rows = max(len(out), _EXPERT_ROWS if listing.rows and experts else listing.rows)
    listed = values.new_empty(rows, values.shape[1]), scale.new_empty(scale.shape[1], rows).t()
    first_expert = [each.new_zeros(rows) for each in experts]
    source = missing_source(partial(gemm, listed, b, out.new_empty(rows, out.shape[1]), *first_expert))
    if source is not None:
        listing.kernels[source] = None


def seconds_on_gpu(call: Callable[[], object]) -> float:
    """Return the seconds of ``call`` on the current device, which is waited for."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_SLEEP)  # type: ignore[no-untyped-call]  # the launches queue behind it, so that none is timed
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


@dataclass(frozen=True)
class DeepGemm:
    """DeepGEMM's products of operands, for :class:`snip_megatron.numerics.products.hopper.HopperBackend`.

    DeepGEMM takes up to 3.5 times cuBLASLt's time, depending on the size and the card. The first product of each size
    is therefore timed by both on the device at hand. As their bits are equal, no result depends on these times.
    """

    gemm: Gemm  # ``deep_gemm.fp8_gemm_nt``; tests on a CPU pass an emulation
    seconds: Callable[[Callable[[], object]], float] = seconds_on_gpu  # the clock of a call on the device
    _is_slower: dict[tuple[int, int, int], bool] = field(default_factory=dict, init=False)

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype, library: CublasLt) -> Tensor | None:
        """Return :meth:`product`, or None if ``library``, cuBLASLt, is faster."""
        size = a.rows, b.rows, a.values.shape[1]
        if size not in self._is_slower and len(self._is_slower) < _MOST_SIZES and self._fits(a, b, dtype):
            captures = a.values.is_cuda and torch.cuda.is_current_stream_capturing()
            if not (listings or recording() or captures):
                self._is_slower[size] = self._compare(a, b, library)
        return None if self._is_slower.get(size, False) else self.product(a, b, dtype)

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor | None:
        """Return a·bᵀ [a.rows, b.rows] for ``a`` in tiles and ``b`` in blocks.

        Returns None if DeepGEMM has no kernel for the operands, or if ``dtype`` is not bf16.
        """
        if not self._fits(a, b, dtype):
            return None
        out = torch.empty(a.rows, b.rows, dtype=dtype, device=a.values.device)
        self._run(a, b, out)
        return out

    def _fits(self, a: Operand, b: Operand, dtype: torch.dtype) -> bool:
        # It reads columns of scales aligned to 16 bytes, and multiples of 16 rows of B.
        fits = a.rows > 0 and a.rows % 4 == 0 and b.rows % 16 == 0 and b.rows > 0 and a.values.shape[1] > 0
        return a.scaling == "tile" and b.scaling == "block" and dtype is torch.bfloat16 and fits

    def _run(self, a: Operand, b: Operand, out: Tensor) -> None:
        run(partial(self.gemm, recipe=_BY_BLOCKS), (a.values, a.scale), (b.values, _blocks(b)), out)

    def _compare(self, a: Operand, b: Operand, library: CublasLt) -> bool:
        """Return whether DeepGEMM takes longer than ``library`` for a product."""
        out = torch.empty(a.rows, b.rows, dtype=torch.bfloat16, device=a.values.device)
        if library.multiply(a, b, out.dtype, out=out) is None:  # it has no kernel
            return False
        self._run(a, b, out)  # compiles the kernel
        calls = partial(self._run, a, b, out), partial(library.multiply, a, b, out.dtype, out=out)
        seconds = [[self.seconds(call) for call in calls] for _ in range(_ROUNDS)]
        ours, theirs = map(min, zip(*seconds, strict=True))
        return bool(ours > theirs)


def deepgemm() -> tuple[DeepGemm | None, str]:
    """Return DeepGEMM, or None if it cannot be used on this machine; and a phrase for the log."""
    from snip_megatron.numerics.quantize.kernels.compiler import replace_nvcc

    reason = why_not()
    if reason is None:
        try:
            replace_nvcc(find_nvcc() or "nvcc")
            return DeepGemm(grouped_library().fp8_gemm_nt), f"DeepGEMM {VERSION} for fprop and dgrad"
        except Exception as error:  # it loads shared libraries and looks for the CUDA toolkit: any of it may fail
            reason = f"cannot be imported ({' '.join(str(error).split())})"
    return None, f"DeepGEMM {reason}"


def grouped_library() -> Any:
    """Return DeepGEMM's module. Raises what its import does."""
    import deep_gemm

    return deep_gemm


@functools.cache
def why_not() -> str | None:
    """Return why DeepGEMM cannot be used on this machine, as the end of a sentence, or None if it may be loaded."""
    version = installed_version(DISTRIBUTION)
    if version is None:
        return "is not installed (pip install snip_megatron[deepgemm])"
    if version != VERSION:
        return f"is {DISTRIBUTION} {version}, supported is {VERSION}"
    release = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if release != TORCH:
        return f"{VERSION} was built for torch {TORCH[0]}.{TORCH[1]}, and this is {torch.__version__}"
    if find_nvcc() is None:
        return "needs nvcc of the CUDA toolkit, which is neither in PATH nor in CUDA_HOME"
    if importlib.util.find_spec("deep_gemm") is None:
        return "cannot be imported"
    return None


def find_nvcc() -> str | None:
    """Return the path of the CUDA compiler that DeepGEMM uses, or None if there is none."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    candidates = (os.path.join(home, "bin", "nvcc") for home in homes if home)
    return next((path for path in candidates if os.access(path, os.X_OK)), None) or shutil.which("nvcc")


def difference(deep_gemm: DeepGemm, cublaslt: Any, device: torch.device | str) -> str | None:
    """Return what is wrong if a small product of DeepGEMM is not bitwise cuBLASLt's. None where kernels are listed."""
    draws = torch.Generator().manual_seed(0)
    x, w = (torch.randn(_SMALL, _SMALL, generator=draws).to(device, torch.bfloat16) for _ in range(2))
    row, _ = quantize_operands(x, OperandSpec(Format.FP8, None))
    block, _ = quantize_operands(w, OperandSpec(Format.FP8, None, weight=True))
    # A library that was built for another torch or driver may raise any exception.
    try:
        ours = deep_gemm.product(row, block, torch.bfloat16)  # also where cuBLASLt is faster
        truth = cublaslt.multiply(row, block, torch.bfloat16)
        if not listings and (ours is None or truth is None or not torch.equal(ours, truth)):
            return f"DeepGEMM {VERSION} does not give cuBLASLt's bits on this device"
    except Exception as error:
        return f"DeepGEMM {VERSION} fails: {type(error).__name__}: {' '.join(str(error).split())}"[:200]
    return None


def unit_operands(rows: int, n: int, depth: int, device: torch.device | str) -> tuple[Operand, Operand]:
    """Return operands [rows, depth] in tiles and [n, depth] in blocks, of zeros."""
    tiles, sides = -(-depth // TILE), []
    scales = (
        torch.ones(tiles, rows, device=device).t(),
        torch.ones(-(-n // TILE), -(-tiles // 4) * 4, device=device).t(),
    )
    for count, scale, scaling in ((rows, scales[0], "tile"), (n, scales[1], "block")):
        values = torch.zeros(count, tiles * TILE, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        sides.append(Operand(values, scale, scaling, depth))
    return sides[0], sides[1]


def _blocks(weight: Operand) -> Tensor:
    """Return the scales [rows/128, D/128] of an operand in blocks, without cuBLASLt's padding, which is copied away.

    DeepGEMM checks all strides. torch calls a matrix of one row contiguous whatever the stride between its rows is, and
    keeps the padded stride of a single column.
    """
    scale = weight.scale.t()[:, : weight.values.shape[1] // TILE]
    return scale.contiguous().view(-1).view(scale.shape)

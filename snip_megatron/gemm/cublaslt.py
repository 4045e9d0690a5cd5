"""Products, and accumulation inside the GEMM: out += A·Bᵀ in one kernel, by the cuBLASLt library torch has loaded.

torch's scaled GEMM always overwrites its result; adding it to ``main_grad`` afterwards reads and writes the gradient of
every weight once more than needed (12 of 16 bytes an element). The library can do it (beta = 1), so this binds the few
functions that takes. Numbers of enumerators: cublasLt.h of CUDA 12.9 and later.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snip_megatron.quantization.packed import Operand

_LIBRARY = "libcublasLt.so.{major}"
_FIRST_VERSION = 120900  # 1×128 and 128×128 scales
_WORKSPACE = 32 << 20  # bytes, what cuBLAS recommends for Hopper
_ALIGNMENT = 256  # bytes, the most that the heuristic distinguishes

_COMPUTE_32F = 68
_REAL_32F, _REAL_16F, _REAL_16BF, _REAL_8F_E4M3 = 0, 2, 14, 28
_TYPES = {
    torch.float32: _REAL_32F,
    torch.float16: _REAL_16F,
    torch.bfloat16: _REAL_16BF,
    torch.float8_e4m3fn: _REAL_8F_E4M3,
}
_SCALE_MODES = {"tensor": 0, "tile": 4, "block": 5}
_NOT_TRANSPOSED, _TRANSPOSED = 0, 1
# Attributes of a matmul descriptor.
_TRANSA, _TRANSB, _A_SCALE, _B_SCALE, _FAST_ACCUMULATION, _A_SCALE_MODE, _B_SCALE_MODE = 3, 4, 17, 18, 25, 31, 32
# Attributes of a preference.
_MAX_WORKSPACE, _ALIGN_A, _ALIGN_B, _ALIGN_C, _ALIGN_D = 1, 5, 6, 7, 8


class CublasLtError(RuntimeError):
    """A call of the library failed; its name and status."""


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class _Matrix(NamedTuple):  # made and hashed for every product: a dataclass costs the host five times as much
    """A matrix as the library sees it (column-major): its type, stored rows and columns, leading dimension."""

    dtype: torch.dtype
    rows: int
    cols: int
    ld: int
    transposed: bool
    scaling: str | None
    alignment: int


class _Problem(NamedTuple):
    """C = op(A)·op(B) or C += op(A)·op(B): what a plan is made for; ``choice`` counts the heuristic's proposals."""

    a: _Matrix
    b: _Matrix
    c: _Matrix
    fast: bool
    choice: int


@dataclass(frozen=True)
class _Plan:
    """What a product is called with, made once: the host pays for every product of every microbatch."""

    operation: ctypes.c_void_p
    a: ctypes.c_void_p
    b: ctypes.c_void_p
    c: ctypes.c_void_p
    algorithm: Any  # reference to a _Heuristic
    workspace: int
    scales: tuple[ctypes.c_void_p, ctypes.c_void_p]


class CublasLt:
    """The library of this process. Plans are made once a shape and kept; calls may come from any thread.

    Raises:
        OSError: the library is not there.
        CublasLtError: it is older than block scaling, or a call fails.
    """

    def __init__(self) -> None:
        major = (torch.version.cuda or "0").split(".")[0]
        self._library = ctypes.CDLL(_LIBRARY.format(major=major))
        self._library.cublasLtGetVersion.restype = ctypes.c_size_t
        self.version = int(self._library.cublasLtGetVersion())
        if self.version < _FIRST_VERSION:
            raise CublasLtError(f"cuBLASLt {self.version} has no 1×128 scales (needs {_FIRST_VERSION})")
        self._handles: dict[int, ctypes.c_void_p] = {}
        self._plans: dict[tuple[int, _Problem], _Plan | None] = {}
        self._lock = threading.Lock()
        self._zero, self._one = ctypes.byref(ctypes.c_float(0.0)), ctypes.byref(ctypes.c_float(1.0))

    # -- products ------------------------------------------------------------------------------------------------
    def accumulate(self, a: Operand, b: Operand, out: Tensor) -> bool:
        """out += a·bᵀ, exactly accumulated; False where the library has no kernel for it and nothing was done.

        Args:
            a, b: quantised, [a.rows, D] and [b.rows, D].
            out: FP32 [a.rows, b.rows], row-major.
        """
        return self.multiply(a, b, out, add=True)

    def multiply(
        self, a: Operand, b: Operand, out: Tensor, *, add: bool = False, fast: bool = False, choice: int = 0
    ) -> bool:
        """out = a·bᵀ, or += with ``add``; False as above.

        Args:
            out: FP32 or bf16 [a.rows, b.rows], row-major.
            fast: let the tensor core accumulate by itself (one scale a tensor only).
            choice: which of the heuristic's proposals to take; the first is what the library recommends.
        """
        # Row-major out is column-major outᵀ = b·aᵀ; a row-major operand [rows, D] is column-major [D, rows].
        left, right = _operand(b, transposed=True), _operand(a, transposed=False)
        problem = _Problem(left, right, _result(out), fast, choice)
        return self._run(problem, (b.values, a.values), (b.scale, a.scale), out, add)

    def accumulate_plain(self, g: Tensor, x: Tensor, out: Tensor) -> bool:
        """out += gᵀ·x for g [T, N], x [T, K] in bf16 or fp16, row-major, and out FP32 [N, K]; False as above."""
        left = _Matrix(x.dtype, x.shape[1], x.shape[0], x.stride(0), False, None, _alignment(x))
        right = _Matrix(g.dtype, g.shape[1], g.shape[0], g.stride(0), True, None, _alignment(g))
        return self._run(_Problem(left, right, _result(out), fast=False, choice=0), (x, g), None, out, add=True)

    def _run(
        self,
        problem: _Problem,
        values: tuple[Tensor, Tensor],
        scales: tuple[Tensor, Tensor] | None,
        out: Tensor,
        add: bool,
    ) -> bool:
        device = torch.cuda.current_device()
        if out.is_cuda and out.get_device() != device:
            with torch.cuda.device(out.device):
                return self._run(problem, values, scales, out, add)
        with self._lock:
            plan = self._plan(device, problem, scales)
            if plan is None:
                return False
            if scales is not None:
                self._set_scales(plan.operation, plan.scales, scales)
            # Freed to the stream's own allocator at return: later work of the stream may have it, other streams not.
            size = plan.workspace
            workspace = torch.empty(size, dtype=torch.uint8, device=out.device) if size else None
            result = _pointer(out)
            self._call(
                "cublasLtMatmul", self._handle(device), plan.operation, self._one, _pointer(values[0]), plan.a,
                _pointer(values[1]), plan.b, self._one if add else self._zero, result, plan.c, result, plan.c,
                plan.algorithm, None if workspace is None else _pointer(workspace), ctypes.c_size_t(size),
                ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device)),
            )  # fmt: skip
        return True

    # -- plans ---------------------------------------------------------------------------------------------------
    def _plan(self, device: int, problem: _Problem, scales: tuple[Tensor, Tensor] | None) -> _Plan | None:
        key = (device, problem)
        if key not in self._plans:
            self._plans[key] = self._make_plan(problem, scales)
        return self._plans[key]

    def _make_plan(self, problem: _Problem, scales: tuple[Tensor, Tensor] | None) -> _Plan | None:
        operation = self.operation(
            problem.a.transposed, problem.b.transposed, problem.a.scaling, problem.b.scaling, fast=problem.fast
        )
        held = ctypes.c_void_p(), ctypes.c_void_p()
        if scales is not None:
            self._set_scales(operation, held, scales)
        a, b, c = (self.layout(_TYPES[m.dtype], m.rows, m.cols, m.ld) for m in (problem.a, problem.b, problem.c))
        found = self._heuristics(problem, operation, a, b, c)
        if len(found) <= problem.choice:
            return None
        chosen = found[problem.choice]
        return _Plan(operation, a, b, c, ctypes.byref(chosen), chosen.workspace, held)

    def operation(
        self,
        transposed_a: bool,
        transposed_b: bool,
        scaling_a: str | None,
        scaling_b: str | None,
        *,
        fast: bool = False,
    ) -> ctypes.c_void_p:
        """Descriptor of a product in FP32 with the scalings of :class:`Operand`, None for operands without scales."""
        operation = ctypes.c_void_p()
        self._call("cublasLtMatmulDescCreate", ctypes.byref(operation), _COMPUTE_32F, _REAL_32F)
        self._set(operation, _TRANSA, ctypes.c_int32(_TRANSPOSED if transposed_a else _NOT_TRANSPOSED))
        self._set(operation, _TRANSB, ctypes.c_int32(_TRANSPOSED if transposed_b else _NOT_TRANSPOSED))
        if scaling_a is not None and scaling_b is not None:
            self._set(operation, _FAST_ACCUMULATION, ctypes.c_int8(fast))
            self._set(operation, _A_SCALE_MODE, ctypes.c_int32(_SCALE_MODES[scaling_a]))
            self._set(operation, _B_SCALE_MODE, ctypes.c_int32(_SCALE_MODES[scaling_b]))
        return operation

    def layout(self, dtype: int, rows: int, cols: int, ld: int) -> ctypes.c_void_p:
        """Column-major [rows, cols] with leading dimension ``ld``."""
        layout = ctypes.c_void_p()
        sizes = (ctypes.c_uint64(rows), ctypes.c_uint64(cols), ctypes.c_int64(ld))
        self._call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), dtype, *sizes)
        return layout

    def preference(self, alignments: tuple[int, int, int]) -> ctypes.c_void_p:
        """Workspace limit and alignments in bytes of A, B and C (which is D)."""
        preference = ctypes.c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        a, b, c = (ctypes.c_uint32(alignment) for alignment in alignments)
        limit = ctypes.c_uint64(_WORKSPACE)
        for name, value in ((_MAX_WORKSPACE, limit), (_ALIGN_A, a), (_ALIGN_B, b), (_ALIGN_C, c), (_ALIGN_D, c)):
            self._set(preference, name, value, "cublasLtMatmulPreferenceSetAttribute")
        return preference

    def _heuristics(self, problem: _Problem, operation: Any, a: Any, b: Any, c: Any) -> list[_Heuristic]:
        """The algorithms that the library proposes, best first; none where it has none."""
        preference = self.preference((problem.a.alignment, problem.b.alignment, problem.c.alignment))
        count = problem.choice + 1
        results, found = (_Heuristic * count)(), ctypes.c_int()
        handle = self._handle(torch.cuda.current_device())
        arguments = handle, operation, a, b, c, c, preference, count, results, ctypes.byref(found)
        status = self._library.cublasLtMatmulAlgoGetHeuristic(*arguments)
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        return [r for r in results[: found.value] if r.state == 0] if status == 0 else []

    # -- calls ---------------------------------------------------------------------------------------------------
    def _handle(self, device: int) -> ctypes.c_void_p:
        if device not in self._handles:
            handle = ctypes.c_void_p()
            self._call("cublasLtCreate", ctypes.byref(handle))
            self._handles[device] = handle
        return self._handles[device]

    def _set_scales(
        self, operation: ctypes.c_void_p, held: tuple[ctypes.c_void_p, ctypes.c_void_p], scales: tuple[Tensor, Tensor]
    ) -> None:
        for name, pointer, scale in zip((_A_SCALE, _B_SCALE), held, scales, strict=True):
            pointer.value = scale.data_ptr()
            self._set(operation, name, pointer)

    def _set(self, target: Any, name: int, value: Any, call: str = "cublasLtMatmulDescSetAttribute") -> None:
        self._call(call, target, name, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise CublasLtError(f"{name} failed with status {status}")


@functools.cache
def cublaslt() -> CublasLt | None:
    """The library, or None where torch came without one that is new enough."""
    try:
        return CublasLt()
    except (OSError, CublasLtError):
        return None


def _operand(side: Operand, *, transposed: bool) -> _Matrix:
    values = side.values
    depth, rows = values.shape[1], values.shape[0]
    return _Matrix(values.dtype, depth, rows, values.stride(0), transposed, side.scaling, _alignment(values))


def _result(out: Tensor) -> _Matrix:
    return _Matrix(out.dtype, out.shape[1], out.shape[0], out.stride(0), False, None, _alignment(out))


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _alignment(tensor: Tensor) -> int:
    """The largest power of two that divides the address, at most what the heuristic distinguishes."""
    address = tensor.data_ptr() | _ALIGNMENT
    return address & -address

"""Products A·Bᵀ by the cuBLASLt library that torch has loaded, with accumulation into the result inside the GEMM.

torch's scaled GEMM overwrites its result. Adding the product to ``main_grad`` afterwards moves 16 bytes per weight
where a GEMM that accumulates (beta = 1) moves 8. The values of enumerators are those of cublasLt.h of CUDA 12.9 and
later.
"""

import ctypes
import functools
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snip_megatron.numerics.quantize.kernels.launch import recording
from snip_megatron.numerics.quantize.kernels.replay import Argument, Recording
from snip_megatron.numerics.quantize.operands import Operand

_Function = ctypes._CFuncPtr  # type: ignore[attr-defined]  # the class of functions that have an address
_SET_OPERATION = "cublasLtMatmulDescSetAttribute"
_LIBRARY = "libcublasLt.so.{major}"
_FIRST_VERSION = 120900  # 1×128 and 128×128 scales
_WORKSPACE = 32 << 20  # bytes, recommended by cuBLAS for Hopper
_ALIGNMENT = 256  # bytes, the largest alignment that the heuristic distinguishes
_MOST_PLANS = 1024
"""Largest number of plans in memory. The rows of experts differ from step to step, and each number needs a plan."""

_COMPUTE_32F = 68
_REAL_32F, _REAL_16F, _REAL_16BF, _REAL_8F_E4M3 = 0, 2, 14, 28
_TYPES = {
    torch.float32: _REAL_32F,
    torch.float16: _REAL_16F,
    torch.bfloat16: _REAL_16BF,
    torch.float8_e4m3fn: _REAL_8F_E4M3,
}
_SCALE_MODES = {"tensor": 0, "tile": 4, "block": 5}
_ON_DEVICE = 1  # a pointer mode: alpha and beta are read from device memory
_IN_FP32 = 1 | 2  # reduction schemes of a split product that add in place or in the compute type, never in bf16
# Attributes of a matmul descriptor.
_POINTER_MODE = 2
_TRANSA, _TRANSB, _A_SCALE, _B_SCALE, _FAST_ACCUMULATION, _A_SCALE_MODE, _B_SCALE_MODE = 3, 4, 17, 18, 25, 31, 32
# Attributes of a preference.
_MAX_WORKSPACE, _REDUCTION_SCHEMES, _ALIGN_A, _ALIGN_B, _ALIGN_C, _ALIGN_D = 1, 3, 5, 6, 7, 8


class CublasLtError(RuntimeError):
    """A call of the library failed. The message has the function's name and status."""


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class _Matrix(NamedTuple):  # built and hashed for every product, which takes a dataclass five times as long
    """A column-major matrix, with stored rows and columns and a leading dimension."""

    dtype: torch.dtype
    rows: int
    cols: int
    ld: int
    transposed: bool
    scaling: str | None
    alignment: int


class _Problem(NamedTuple):
    """A product op(A)·op(B) that overwrites C or is added to it; ``scaled``: whether a factor is on the device."""

    a: _Matrix
    b: _Matrix
    c: _Matrix
    fast: bool
    choice: int
    scaled: bool = False


class _Descriptor(ctypes.c_void_p):
    """A descriptor of the library, which is destroyed with its last reference."""

    destroy: Callable[[ctypes.c_void_p], object] | None = None

    def __del__(self) -> None:
        if self.destroy is not None:
            self.destroy(self)


@dataclass(frozen=True)
class _Plan:
    """The arguments of a product, built once per problem to save host time."""

    operation: _Descriptor
    a: _Descriptor
    b: _Descriptor
    c: _Descriptor
    algorithm: Any  # reference to a _Heuristic
    workspace: int
    scales: tuple[ctypes.c_void_p, ctypes.c_void_p]


class CublasLt:
    """The cuBLASLt library of this process. Products may be called from any thread. Plans are cached.

    Raises OSError if it cannot be loaded, and CublasLtError if it is too old to have 1×128 scales, or if a call fails.
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
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    # -- products ------------------------------------------------------------------------------------------------
    def multiply(
        self,
        a: Operand | Tensor,
        b: Operand | Tensor,
        dtype: torch.dtype,
        *,
        transposed: tuple[bool, bool] = (False, True),
        fast: bool = False,
        choice: int = 0,
        factor: Tensor | None = None,
        out: Tensor | None = None,
        add: bool = False,
    ) -> Tensor | None:
        """Return op(a)·op(b), or None, without doing anything, if the library has no kernel for the operands.

        Args:
            a, b: quantised operands [a.rows, D] and [b.rows, D], whose product is a·bᵀ, or row-major matrices in bf16
                or fp16.
            dtype: dtype of the result, FP32, bf16 or, of matrices, fp16. Parts of a product are added in FP32.
            transposed: of matrices, whether op transposes a, and b.
            fast: whether operands with one scale per tensor use the tensor core's fast accumulation.
            choice: index of the heuristic's proposal to use.
            factor: of matrices, FP32 [1] on the device, by which the product is multiplied. None stands for 1.
            out: memory for the result, row-major, in ``dtype``. If it is None, the result is in new memory.
            add: whether the product is added to what is in ``out``, in FP32.
        """
        scales: tuple[Tensor, Tensor] | None = None
        # Row-major out is column-major outᵀ, of which B comes first. Row-major operands are column-major transposes.
        if isinstance(a, Operand) and isinstance(b, Operand):
            values, scales = (b.values, a.values), (b.scale, a.scale)
            left, right = _matrix(b.values, True, b.scaling), _matrix(a.values, False, a.scaling)
            result = _result(out, dtype, a.rows, b.rows)
        else:
            assert isinstance(a, Tensor)
            assert isinstance(b, Tensor)
            values = b, a
            left, right = _matrix(b, transposed[1]), _matrix(a, transposed[0])
            result = _result(out, dtype, a.shape[1 if transposed[0] else 0], b.shape[0 if transposed[1] else 1])
        problem = _Problem(left, right, result, fast, choice, factor is not None)
        device, first = torch.cuda.current_device(), values[0]
        if first.is_cuda and first.get_device() != device:
            with torch.cuda.device(first.device):
                return self.multiply(
                    a, b, dtype, transposed=transposed, fast=fast, choice=choice, factor=factor, out=out, add=add
                )
        with self._lock:
            plan = self._plan(device, problem, scales)
            if plan is None:
                return None
            if out is None:
                out = torch.empty(result.cols, result.rows, dtype=dtype, device=first.device)
            if scales is not None:
                self._set_scales(plan.operation, plan.scales, scales)
            # After the method returns, the allocator gives this memory only to later work of the same stream.
            size = plan.workspace
            workspace = torch.empty(size, dtype=torch.uint8, device=out.device) if size else None
            memory = _pointer(out)
            alpha, beta = self._factors(add, factor)
            status = self._library.cublasLtMatmul(
                self._handle(device), plan.operation, alpha, _pointer(values[0]), plan.a,
                _pointer(values[1]), plan.b, beta, memory, plan.c, memory, plan.c,
                plan.algorithm, None if workspace is None else _pointer(workspace), ctypes.c_size_t(size),
                ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device)),
            )  # fmt: skip
            if status != 0:
                raise CublasLtError(f"cublasLtMatmul failed with status {status}")
            if (active_recording := recording()) is not None:
                tensors = (*values, out, workspace, factor)
                self._record(active_recording, device, problem, plan, tensors, scales, add=add)
        return out

    def _record(
        self,
        recorded: Recording,
        device: int,
        problem: _Problem,
        plan: _Plan,
        tensors: tuple[Tensor | None, ...],
        scales: tuple[Tensor, Tensor] | None,
        *,
        add: bool,
    ) -> None:
        """Record a product with a new descriptor, because the descriptor holds the addresses of scales.

        The recording keeps the plan, whose addresses it has, after the plan has left the cache. ``tensors`` are A, B,
        result, workspace and factor.
        """
        descriptor = self._operation(problem)
        operation = descriptor.value or 0
        for name, scale in zip((_A_SCALE, _B_SCALE), scales or (), strict=False):
            setting = (operation, name, ("pointer", (recorded.address(scale),)), 8)
            recorded.c_call(_SET_OPERATION, self._function(_SET_OPERATION), *setting)
        a, b, out, workspace, factor = (0 if t is None else recorded.address(t) for t in tensors)
        alpha, beta = (
            f.value or 0 if isinstance(f, ctypes.c_void_p) else ctypes.addressof(f._obj)
            for f in self._factors(add, tensors[4])
        )
        first: Argument = factor if tensors[4] is not None else alpha
        layouts = [layout.value or 0 for layout in (plan.a, plan.b, plan.c)]
        recorded.c_call(
            "cublasLtMatmul", self._function("cublasLtMatmul"), self._handle(device).value or 0, operation, first,
            a, layouts[0], b, layouts[1], beta, out, layouts[2], out, layouts[2],
            ctypes.addressof(plan.algorithm._obj), workspace, plan.workspace, ("stream",), owner=(descriptor, plan),
        )  # fmt: skip

    def _function(self, name: str) -> int:
        """Return the address of a function of the library, or 0 if it has none."""
        function = getattr(self._library, name)
        return ctypes.cast(function, ctypes.c_void_p).value or 0 if isinstance(function, _Function) else 0

    def _factors(self, add: bool, factor: Tensor | None) -> tuple[Any, Any]:
        """Return where alpha and beta are: both in host memory, or both on the device."""
        if factor is None:
            return self._one, self._one if add else self._zero
        if factor.device not in self._on_device:
            zero, one = torch.zeros(1, device=factor.device), torch.ones(1, device=factor.device)
            self._on_device[factor.device] = zero, one
        return _pointer(factor), _pointer(self._on_device[factor.device][add])

    # -- plans ---------------------------------------------------------------------------------------------------
    def _plan(self, device: int, problem: _Problem, scales: tuple[Tensor, Tensor] | None) -> _Plan | None:
        """Return the cached or a new plan of a problem, or None if the library has no kernel for it."""
        key = (device, problem)
        if key not in self._plans:
            operation, pointers = self._operation(problem), (ctypes.c_void_p(), ctypes.c_void_p())
            if scales is not None:
                self._set_scales(operation, pointers, scales)
            a, b, c = (self.layout(_TYPES[m.dtype], m.rows, m.cols, m.ld) for m in (problem.a, problem.b, problem.c))
            chosen = self._proposal(problem, operation, a, b, c)
            plan = None
            if chosen is not None:
                plan = _Plan(operation, a, b, c, ctypes.byref(chosen), chosen.workspace, pointers)
            if len(self._plans) >= _MOST_PLANS:
                del self._plans[next(iter(self._plans))]  # the oldest
            self._plans[key] = plan
        return self._plans[key]

    def _operation(self, problem: _Problem) -> _Descriptor:
        """Make the descriptor of an FP32 product."""
        operation, a, b = self._descriptor("MatmulDesc", _COMPUTE_32F, _REAL_32F), problem.a, problem.b
        self._set(operation, _TRANSA, ctypes.c_int32(a.transposed))
        self._set(operation, _TRANSB, ctypes.c_int32(b.transposed))
        if problem.scaled:
            self._set(operation, _POINTER_MODE, ctypes.c_int32(_ON_DEVICE))
        if a.scaling is not None and b.scaling is not None:
            self._set(operation, _FAST_ACCUMULATION, ctypes.c_int8(problem.fast))
            self._set(operation, _A_SCALE_MODE, ctypes.c_int32(_SCALE_MODES[a.scaling]))
            self._set(operation, _B_SCALE_MODE, ctypes.c_int32(_SCALE_MODES[b.scaling]))
        return operation

    def layout(self, dtype: int, rows: int, cols: int, ld: int) -> _Descriptor:
        """Make the layout of a column-major matrix [rows, cols] with leading dimension ``ld``."""
        sizes = (ctypes.c_uint64(rows), ctypes.c_uint64(cols), ctypes.c_int64(ld))
        return self._descriptor("MatrixLayout", dtype, *sizes)

    def _descriptor(self, kind: str, *arguments: Any) -> _Descriptor:
        descriptor = _Descriptor()
        self._call(f"cublasLt{kind}Create", ctypes.byref(descriptor), *arguments)
        descriptor.destroy = getattr(self._library, f"cublasLt{kind}Destroy")
        return descriptor

    def _preference(self, problem: _Problem) -> _Descriptor:
        """Make a preference. Algorithms that add parts of a product in another dtype than FP32 are excluded."""
        preference, limit = self._descriptor("MatmulPreference"), ctypes.c_uint64(_WORKSPACE)
        a, b, c = (ctypes.c_uint32(matrix.alignment) for matrix in problem[:3])
        values = [(_MAX_WORKSPACE, limit), (_ALIGN_A, a), (_ALIGN_B, b), (_ALIGN_C, c), (_ALIGN_D, c)]
        if problem.c.dtype is not torch.float32:
            values.append((_REDUCTION_SCHEMES, ctypes.c_uint32(_IN_FP32)))
        for name, value in values:
            self._set(preference, name, value, "cublasLtMatmulPreferenceSetAttribute")
        return preference

    def _proposal(self, problem: _Problem, operation: Any, a: Any, b: Any, c: Any) -> _Heuristic | None:
        """Return the algorithm that the library proposes at the place ``problem.choice``, or None."""
        preference, count = self._preference(problem), problem.choice + 1
        results, proposed = (_Heuristic * count)(), ctypes.c_int()
        arguments = operation, a, b, c, c, preference, count, results, ctypes.byref(proposed)
        handle = self._handle(torch.cuda.current_device())
        status = self._library.cublasLtMatmulAlgoGetHeuristic(handle, *arguments)
        usable = [r for r in results[: proposed.value] if r.state == 0] if status == 0 else []
        return usable[problem.choice] if problem.choice < len(usable) else None

    # -- calls ---------------------------------------------------------------------------------------------------
    def _handle(self, device: int) -> ctypes.c_void_p:
        if device not in self._handles:
            handle = ctypes.c_void_p()
            self._call("cublasLtCreate", ctypes.byref(handle))
            self._handles[device] = handle
        return self._handles[device]

    def _set_scales(self, operation: Any, pointers: tuple[Any, Any], scales: tuple[Tensor, Tensor]) -> None:
        for name, pointer, scale in zip((_A_SCALE, _B_SCALE), pointers, scales, strict=True):
            pointer.value = scale.data_ptr()
            self._set(operation, name, pointer)

    def _set(self, target: Any, name: int, value: Any, call: str = _SET_OPERATION) -> None:
        self._call(call, target, name, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise CublasLtError(f"{name} failed with status {status}")


@functools.cache
def cublaslt() -> CublasLt | None:
    """Return the library, or None if it is missing or too old."""
    try:
        return CublasLt()
    except (OSError, CublasLtError):
        return None


MEASURED = Path(__file__).with_name("proposals.json")
Choices = Mapping[tuple[int, int, int], int]
"""(rows of A, rows of B, reduction) → index of the proposal for A·Bᵀ with one scale per tensor, fast accumulation and a
bf16 result. The first proposal is used for other shapes."""


def measured_choices(version: int, device: str, path: Path = MEASURED) -> Choices:
    """Return the choices for a cuBLASLt version and a CUDA device name. Empty if the file was measured with others.

    ``benchmarks.kernels.proposals`` writes the file. A measurement at run time would make the bits of a run depend on
    it.
    """
    table = json.loads(path.read_text())
    if (table["cublaslt"], table["device"]) != (version, device):
        return {}
    return {(row["a_rows"], row["b_rows"], row["depth"]): row["choice"] for row in table["rows"]}


def is_gradient(out: Tensor) -> bool:
    """Return whether cuBLASLt can accumulate into ``out``: FP32 or bf16, row-major, rows aligned to 16 bytes."""
    aligned = out.data_ptr() % 16 == 0 and out.shape[1] * out.itemsize % 16 == 0
    return out.dtype in (torch.bfloat16, torch.float32) and out.is_contiguous() and aligned


def _matrix(x: Tensor, transposed: bool = False, scaling: str | None = None) -> _Matrix:
    """Describe a row-major matrix as its column-major transpose."""
    return _Matrix(x.dtype, x.shape[1], x.shape[0], x.stride(0), transposed, scaling, _alignment(x))


def _result(out: Tensor | None, dtype: torch.dtype, rows: int, cols: int) -> _Matrix:
    """Describe the memory of a result. torch's allocator aligns new memory to more than ``_ALIGNMENT``."""
    return _Matrix(dtype, cols, rows, cols, False, None, _ALIGNMENT) if out is None else _matrix(out)


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _alignment(tensor: Tensor) -> int:
    """Return the largest power of two, up to ``_ALIGNMENT``, that divides the tensor's address."""
    address = tensor.data_ptr() | _ALIGNMENT
    return address & -address

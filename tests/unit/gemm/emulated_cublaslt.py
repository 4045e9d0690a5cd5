"""The functions of cuBLASLt that ``cublaslt.py`` calls, on host memory: column-major, as its documentation says."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from snip_megatron.gemm import cublaslt

from .emulated_scaled_mm import TILE

_DTYPES = {number: dtype for dtype, number in cublaslt._TYPES.items()}
_BYTES = {torch.float32: np.uint32, torch.float16: np.uint16, torch.bfloat16: np.uint16, torch.float8_e4m3fn: np.uint8}


class EmulatedLibrary:
    """Refuses what the heuristic would: a C that is no multiple of 16 bytes wide."""

    def __init__(self) -> None:
        self.objects: dict[int, dict[Any, Any]] = {}
        self.heuristics = 0
        self.cublasLtGetVersion = functools.partial(int, 130100)  # takes a restype, as a ctypes function does

    def _create(self, target: Any, **fields: Any) -> int:
        key = 0x1000 + len(self.objects)
        self.objects[key] = fields
        target._obj.value = key
        return 0

    def cublasLtCreate(self, handle: Any) -> int:
        return self._create(handle)

    def cublasLtMatmulDescCreate(self, operation: Any, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)
        return self._create(operation)

    def cublasLtMatrixLayoutCreate(self, layout: Any, dtype: int, rows: Any, cols: Any, ld: Any) -> int:
        assert ld.value >= rows.value
        return self._create(layout, dtype=_DTYPES[dtype], rows=rows.value, cols=cols.value, ld=ld.value)

    def cublasLtMatmulPreferenceCreate(self, preference: Any) -> int:
        return self._create(preference)

    def cublasLtMatmulPreferenceDestroy(self, preference: Any) -> int:
        return 0

    def _set(self, target: Any, name: int, value: Any, size: Any) -> int:
        assert size.value == ctypes.sizeof(value._obj)
        self.objects[target.value][name] = value._obj.value
        return 0

    cublasLtMatmulDescSetAttribute = cublasLtMatmulPreferenceSetAttribute = _set

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:
        *_, c, _, preference, count, results, found = arguments
        self.heuristics += 1
        assert self.objects[preference.value][cublaslt._MAX_WORKSPACE] > 0
        layout = self.objects[c.value]
        found._obj.value = 0 if layout["ld"] % 4 else count
        for index, result in enumerate(results):
            result.state, result.workspace, result.algorithm[0] = 0, 64, index + 1
        return 0

    def cublasLtMatmul(self, *arguments: Any) -> int:
        _, operation, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout = arguments[:12]
        algorithm, workspace = arguments[12:14]
        assert c.value == d.value
        assert c_layout.value == d_layout.value
        assert workspace is not None
        assert algorithm._obj.algorithm[0] > 0
        op = self.objects[operation.value]
        left = self._matrix(a, a_layout, op.get(cublaslt._A_SCALE), op.get(cublaslt._A_SCALE_MODE))
        right = self._matrix(b, b_layout, op.get(cublaslt._B_SCALE), op.get(cublaslt._B_SCALE_MODE))
        left = left.t() if op[cublaslt._TRANSA] else left
        right = right.t() if op[cublaslt._TRANSB] else right
        result = _view(c, self.objects[c_layout.value])
        on_device = op.get(cublaslt._POINTER_MODE) == cublaslt._ON_DEVICE
        factors = [float(_floats(f.value, 1)) if on_device else f._obj.value for f in (alpha, beta)]
        product = factors[0] * (left @ right)
        result.copy_(product + (factors[1] * result.double() if factors[1] else 0.0))
        return 0

    def _matrix(self, pointer: Any, layout: Any, scale: int | None, mode: int | None) -> torch.Tensor:
        """float64 [rows, cols]. The reduction of scaled operands is their stored rows."""
        fields = self.objects[layout.value]
        exact = _view(pointer, fields).double()
        if scale is None:
            return exact
        rows, cols = fields["rows"], fields["cols"]
        tiles = rows // TILE
        if mode == 0:
            return exact * float(_floats(scale, 1))
        if mode == 4:  # one a column and 128 rows; columns next to each other
            return exact * _floats(scale, tiles * cols).view(tiles, cols).repeat_interleave(TILE, 0)
        depth = -(-tiles // 4) * 4
        blocks = _floats(scale, depth * -(-cols // TILE)).view(-1, depth)[:, :tiles].t()
        return exact * blocks.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)[:, :cols]


def _view(pointer: Any, fields: dict[str, Any]) -> torch.Tensor:
    """The column-major matrix at ``pointer``, sharing its memory."""
    kind = _BYTES[fields["dtype"]]
    size = fields["ld"] * (fields["cols"] - 1) + fields["rows"]
    raw = np.ctypeslib.as_array((np.ctypeslib.as_ctypes_type(kind) * size).from_address(pointer.value))
    flat = torch.from_numpy(raw).view(fields["dtype"])
    return flat.as_strided((fields["rows"], fields["cols"]), (1, fields["ld"]))


def _floats(address: int, count: int) -> torch.Tensor:
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))).double()


def emulated_cublaslt(
    monkeypatch: pytest.MonkeyPatch, library: Callable[[], EmulatedLibrary] = EmulatedLibrary
) -> cublaslt.CublasLt:
    """Return the binding on an emulated library, for tensors of the host."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library())
    return cublaslt.CublasLt()

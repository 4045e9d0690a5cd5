"""Transformer Engine's quantizers and GEMM on a CPU: signatures, bytes and refusals of the real ones (2.20).

Bytes are laid out as Transformer Engine's storages are: E4M3 or packed pairs of E2M1 (low nibble first), scales in E8M0
or E4M3, padded to 128×4 with bytes that nobody may read, NVFP4's column-wise usage transposed. The GEMM decodes them.
What kernels compute on a GPU is tested in tests/gpu; tests compare this with an installed Transformer Engine.
"""

import math
from typing import Any

import torch
from torch import Tensor

from snip_megatron.numerics.products.blackwell_engine import TransformerEngine
from snip_megatron.numerics.quantize import quantize
from snip_megatron.precision import Format

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_TILE = {"nvfp4": 16, "mxfp8": 32}
_UNREAD = 0xFF  # NaN as a scale of either kind


class Storage:
    """NVFP4TensorStorage and MXFP8TensorStorage: the tensors by name, and what a GEMM may read of them."""

    def __init__(self, **metadata: Any) -> None:
        self._metadata = metadata
        data, transposed = metadata["rowwise_data"], metadata["columnwise_data"]
        self.format = "nvfp4" if "fp4_dtype" in metadata else "mxfp8"
        if self.format == "mxfp8":
            self.shape = tuple((transposed if data is None else data).shape)
        elif data is not None:
            self.shape = (data.shape[0], 2 * data.shape[1])
        else:
            self.shape = (2 * transposed.shape[1], transposed.shape[0])

    def get_metadata(self) -> dict[str, Any]:
        return dict(self._metadata)

    def decode(self, usage: str) -> Tensor:
        """FP32 [rows, cols] from the bytes of one usage."""
        data, scale = self._metadata[f"{usage}_data"], self._metadata[f"{usage}_scale_inv"]
        assert data is not None, f"the GEMM reads {usage} data that are not there"
        if self.format == "nvfp4":
            values = _E2M1[torch.stack((data & 15, data >> 4), dim=-1).flatten(1).int()]
            scales = _used(scale, values.shape[0], values.shape[1] // 16).view(torch.float8_e4m3fn).float()
            amax = self._metadata[f"amax_{usage}"]
            decoded = values * (scales * (amax / (6.0 * 448.0))).repeat_interleave(16, dim=1)
            return decoded.t() if usage == "columnwise" else decoded
        values, rows, cols = data.view(torch.float8_e4m3fn).float(), *data.shape
        if usage == "rowwise":
            return values * _e8m0(_used(scale, rows, cols // 32)).repeat_interleave(32, dim=1)
        return values * _e8m0(_used(scale, rows // 32, cols)).repeat_interleave(32, dim=0)


class _Quantizer:
    """What the two have in common."""

    def __init__(self, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise
        self.internal = False

    def _checked(self, x: Tensor, tile: int) -> Tensor:
        assert self.internal, "a tensor subclass is not what a GEMM of ours reads"
        assert not torch.is_grad_enabled()
        assert x.dim() == 2
        assert x.is_contiguous()
        assert all(size % tile == 0 for size in x.shape), "dimensions must be whole tiles"
        return x


class NVFP4Quantizer(_Quantizer):
    """``transformer_engine.pytorch.tensor.nvfp4_tensor.NVFP4Quantizer``."""

    def __init__(
        self,
        fp4_dtype: Any = "kFloat4E2M1",
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        super().__init__(rowwise, columnwise)
        self.dtype = fp4_dtype
        assert not any((with_amax_reduction, with_rht, with_post_rht_amax))
        self.with_2d_quantization, self.stochastic_rounding = with_2d_quantization, stochastic_rounding

    def __call__(self, tensor: Tensor, amax: Tensor | None = None) -> Storage:
        x = self._checked(tensor, 16)
        whole = x.float().abs().amax().view(1) if amax is None else amax
        metadata: dict[str, Any] = {"fp4_dtype": self.dtype, "quantizer": self, "fake_dtype": x.dtype}
        for usage, wanted in (("rowwise", self.rowwise_usage), ("columnwise", self.columnwise_usage)):
            used = self._side(x if usage == "rowwise" else x.t().contiguous(), whole) if wanted else (None,) * 3
            metadata |= dict(zip((f"{usage}_data", f"{usage}_scale_inv", f"amax_{usage}"), used, strict=True))
        return Storage(**metadata, with_gemm_swizzled_scales=False)

    def _side(self, x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rounding: dict[str, Any] = {}
        if self.stochastic_rounding:  # keyed by the default generator, as the kernels are
            seed = int(torch.randint(2**62, ()))
            rounding = {"rounding": "stochastic", "seed": seed}
        q = quantize(x, Format.NVFP4, block=self.with_2d_quantization, tensor_amax=amax.view(()), **rounding)
        codes = (q.values.abs().unsqueeze(-1) == _E2M1[:8]).int().argmax(-1) + 8 * q.values.signbit()
        scale = (q.scale / (amax / (6.0 * 448.0))).nan_to_num().repeat_interleave(q.tile[0], dim=0)
        stored = scale.to(torch.float8_e4m3fn).view(torch.uint8)
        packed = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
        return packed, _padded(stored, 128, 4), amax.clone()


class MXFP8Quantizer(_Quantizer):
    """``transformer_engine.pytorch.tensor.mxfp8_tensor.MXFP8Quantizer``; scales are rounded up, as its kernels do."""

    def __init__(
        self, fp8_dtype: Any, *, rowwise: bool = True, columnwise: bool = True, with_2d_quantization: bool = False
    ) -> None:
        super().__init__(rowwise, columnwise)
        assert not with_2d_quantization
        self.dtype = fp8_dtype

    def __call__(self, tensor: Tensor) -> Storage:
        x = self._checked(tensor, 32)
        metadata: dict[str, Any] = {"fp8_dtype": self.dtype, "quantizer": self, "fake_dtype": x.dtype}
        for usage, wanted in (("rowwise", self.rowwise_usage), ("columnwise", self.columnwise_usage)):
            data, scale = self._side(x if usage == "rowwise" else x.t()) if wanted else (None, None)
            if usage == "columnwise" and data is not None and scale is not None:
                data, scale = data.t().contiguous(), scale.t()
            metadata[f"{usage}_data"] = data
            edges = (128, 4) if usage == "rowwise" else (4, 128)
            metadata[f"{usage}_scale_inv"] = None if scale is None else _padded(scale, *edges)
        return Storage(**metadata, with_gemm_swizzled_scales=False)

    def _side(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tiles = x.float().unflatten(1, (-1, 32))
        amax = tiles.abs().amax(-1, keepdim=True)
        exponent = torch.where(amax > 0, torch.ceil(torch.log2(amax / 448.0)), -127.0)
        values = (tiles * torch.exp2(-exponent)).flatten(1).to(torch.float8_e4m3fn)
        return values.view(torch.uint8), (exponent.squeeze(-1) + 127).to(torch.uint8)


def general_gemm(
    A: Storage,
    B: Storage,
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
) -> tuple[Tensor, None, None, None]:
    """``transformer_engine.pytorch.cpp_extensions.gemm.general_gemm``."""
    assert layout in ("TN", "NN", "NT")
    assert quantization_params is bias is beta is None
    assert A.format == B.format, "inputs of different scaling modes"
    assert grad == (layout != "TN")
    assert use_split_accumulator
    a = A.decode("rowwise" if layout[0] == "T" else "columnwise")
    b = B.decode("columnwise" if layout[1] == "T" else "rowwise")
    product = {"TN": lambda: b @ a.t(), "NN": lambda: b @ a, "NT": lambda: b.t() @ a}[layout]()
    assert all(size % _TILE[A.format] == 0 for size in product.shape)
    if out is None:
        assert not accumulate
        assert out_dtype in (torch.bfloat16, torch.float32), "FP4 GEMMs have no FP16 output"
        return product.to(out_dtype), None, None, None
    assert accumulate
    assert out.is_contiguous()
    assert out.dtype == out_dtype == torch.float32
    assert out.shape == product.shape
    return out.add_(product), None, None, None


def nvfp4_quantize_with_amax(
    tensor: Tensor, quantizer: NVFP4Quantizer, rowwise_amax: Tensor, columnwise_amax: Tensor
) -> Storage:
    """``transformer_engine_torch.nvfp4_quantize_with_amax``."""
    assert rowwise_amax.numel() == columnwise_amax.numel() == 1
    assert rowwise_amax.dtype == columnwise_amax.dtype == torch.float32
    return quantizer(tensor, rowwise_amax)


def engine(*, with_amax: bool = True) -> TransformerEngine:
    """The real adapter over all of that."""

    def mxfp8(**options: Any) -> MXFP8Quantizer:
        return MXFP8Quantizer("kFloat8E4M3", **options)

    return TransformerEngine(NVFP4Quantizer, mxfp8, general_gemm, nvfp4_quantize_with_amax if with_amax else None)


def _e8m0(scale: Tensor) -> Tensor:
    return torch.exp2(scale.float() - 127)


def _padded(scale: Tensor, rows: int, cols: int) -> Tensor:
    shape = [math.ceil(size / edge) * edge for size, edge in zip(scale.shape, (rows, cols), strict=True)]
    padded = torch.full(shape, _UNREAD, dtype=torch.uint8)
    padded[: scale.shape[0], : scale.shape[1]] = scale
    return padded


def _used(scale: Tensor, rows: int, cols: int) -> Tensor:
    return scale[:rows, :cols]

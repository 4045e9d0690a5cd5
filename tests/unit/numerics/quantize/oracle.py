"""Independent quantisers in numpy and ml_dtypes."""

import ml_dtypes
import numpy as np

ELEMENTS = {
    "fp4": (ml_dtypes.float4_e2m1fn, 6.0),
    "fp8": (ml_dtypes.float8_e4m3fn, 448.0),
    "fp8_tensor": (ml_dtypes.float8_e4m3fn, 448.0),
    "nvfp4": (ml_dtypes.float4_e2m1fn, 6.0),
    "mxfp4": (ml_dtypes.float4_e2m1fn, 6.0),
    "mxfp8": (ml_dtypes.float8_e4m3fn, 448.0),
}
FORMATS = tuple(ELEMENTS)


def round_element(y: np.ndarray, fmt: str) -> np.ndarray:
    """Saturate, then ml_dtypes' own conversion (nearest, ties to even)."""
    dtype, maximum = ELEMENTS[fmt]
    return np.clip(y.astype(np.float32), -maximum, maximum).astype(dtype).astype(np.float32)


def tile_shape(fmt: str, granularity: str, shape: tuple[int, int]) -> tuple[int, int]:
    if fmt == "fp8_tensor":
        return shape
    if fmt.startswith("mx"):
        return 1, 32
    edge = 16 if fmt == "nvfp4" else 128
    return (edge, edge) if granularity == "block" else (1, edge)


def quantize_dequantize(x: np.ndarray, fmt: str, granularity: str = "tile") -> np.ndarray:
    """FP32 [rows, cols]; every division and product is numpy's float32."""
    x = x.astype(np.float32)
    height, width = tile_shape(fmt, granularity, x.shape)
    out = np.empty_like(x)
    finite = np.where(np.isfinite(x), np.abs(x), 0)
    tensor_amax = finite.max(initial=np.float32(0))  # nvfp4: NaN and Inf do not count for the tensor's scale
    spans = [
        (slice(i, i + height), slice(j, j + width))
        for i in range(0, x.shape[0], height)
        for j in range(0, x.shape[1], width)
    ]
    for span in spans:
        if not np.isfinite(x[span]).all():
            out[span] = np.nan
            continue
        scale = _scale(finite[span].max(), fmt, tensor_amax)
        out[span] = 0 if scale == 0 else round_element(x[span] / scale, fmt) * scale
    return out


def _scale(amax: np.float32, fmt: str, tensor_amax: np.float32) -> np.float32:
    """Return the scale of a tile. 0 makes the tile zero."""
    maximum = np.float32(ELEMENTS[fmt][1])
    if amax == 0:
        return np.float32(0)
    if fmt.startswith("mx"):
        emax = int(np.log2(float(maximum)))
        exponent = int(np.floor(np.log2(float(amax)))) - emax  # float64 log2 is exact at powers of two
        stored = np.array(2.0 ** max(exponent, -127)).astype(ml_dtypes.float8_e8m0fnu)
        return np.float32(stored)
    if fmt == "nvfp4":
        tensor_scale = tensor_amax / np.float32(6 * 448)
        if tensor_scale == 0:
            tensor_scale = np.float32(1)
        return round_element(np.array((amax / maximum) / tensor_scale), "fp8")[()] * tensor_scale
    return amax / maximum


Span = tuple[slice, slice]


def four_over_six(x: np.ndarray) -> list[tuple[Span, list[np.ndarray], list[float]]]:
    """Every 1×16 tile, quantised so that its amax becomes 6 or 4, and the squared errors of both in float64."""
    x = x.astype(np.float32)
    tensor_scale = np.abs(x).max() / np.float32(6 * 256) or np.float32(1)
    result = []
    for i in range(x.shape[0]):
        for j in range(0, x.shape[1], 16):
            span = slice(i, i + 1), slice(j, j + 16)
            numbers = [_quantised(x[span], np.float32(top), tensor_scale) for top in (6, 4)]
            errors = [float(np.square(each.astype(np.float64) - x[span]).sum()) for each in numbers]
            result.append((span, numbers, errors))
    return result


def _quantised(tile: np.ndarray, top: np.float32, tensor_scale: np.float32) -> np.ndarray:
    stored = round_element(np.array(np.abs(tile).max() / top / tensor_scale), "fp8")[()]
    scale = np.float32(stored * tensor_scale)
    return np.zeros_like(tile) if scale == 0 else round_element(tile / scale, "nvfp4") * scale

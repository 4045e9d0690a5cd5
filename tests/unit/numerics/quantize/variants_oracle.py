"""Independent quantisers of the variants in numpy, from the descriptions in quantize/README.md."""

from typing import NamedTuple

import numpy as np

from . import oracle


class Choices(NamedTuple):
    """The two ways to quantise a tile under four-over-six, and the squared error of each in float64."""

    span: tuple[slice, slice]
    numbers: tuple[np.ndarray, np.ndarray]
    errors: tuple[float, float]


def four_over_six(x: np.ndarray) -> list[Choices]:
    """Return both choices of every 1×16 tile of a finite matrix: its amax becomes 6, or 4."""
    x = x.astype(np.float32)
    tensor_scale = np.abs(x).max() / np.float32(6 * 256) or np.float32(1)
    found = []
    for i in range(x.shape[0]):
        for j in range(0, x.shape[1], 16):
            span = slice(i, i + 1), slice(j, j + 16)
            numbers = tuple(_quantised(x[span], np.float32(top), tensor_scale) for top in (6, 4))
            errors = tuple(float(np.square(each.astype(np.float64) - x[span]).sum()) for each in numbers)
            found.append(Choices(span, (numbers[0], numbers[1]), (errors[0], errors[1])))
    return found


def _quantised(tile: np.ndarray, top: np.float32, tensor_scale: np.float32) -> np.ndarray:
    stored = oracle.round_element(np.array(np.abs(tile).max() / top / tensor_scale), "fp8")[()]
    scale = np.float32(stored * tensor_scale)
    return np.zeros_like(tile) if scale == 0 else oracle.round_element(tile / scale, "nvfp4") * scale

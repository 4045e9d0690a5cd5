"""What tests of replays call: a stand-in for CUDA's driver, in C, whose kernels are functions of the host."""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snip_megatron.numerics.quantize.kernels.launch import recording

SOURCE = """
#include <stdint.h>
typedef void (*kernel)(unsigned grid_x, unsigned grid_y, unsigned threads, void** arguments);

int launch(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
           unsigned shared, void* stream, void** arguments, void** extra) {
  if (!function || z != 1 || ty != 1 || tz != 1 || shared != 48 || extra) return 1;
  ((kernel)function)(x, y, threads, arguments);
  return 0;
}

/* out[i] = x[i] * factor + grid_x, for grid_y numbers. Scratch addresses follow the arguments and are null. */
void scale(unsigned grid_x, unsigned grid_y, unsigned threads, void** a) {
  float *x = *(float**)a[0], *out = *(float**)a[1];
  for (unsigned i = 0; i < grid_y; i++) out[i] = x[i] * *(int32_t*)a[2] + grid_x;
  if (*(void**)a[3] || *(void**)a[4]) out[0] = -1;
}

/* out[0..4] = threads, an offset, and three words of keys */
void words(unsigned grid_x, unsigned grid_y, unsigned threads, void** a) {
  int64_t* out = *(int64_t**)a[0];
  out[0] = threads, out[1] = *(int64_t*)a[1];
  for (int i = 0; i < 3; i++) out[2 + i] = *(int32_t*)a[2 + i];
}
"""


class Library:
    """The compiled stand-in.

    Args:
        folder: where it is compiled.
    """

    def __init__(self, folder: Path) -> None:
        source, library = folder / "driver.c", folder / "driver.so"
        source.write_text(SOURCE)
        subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))

    def address(self, name: str) -> int:
        return int(ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value or 0)

    def kernel(self, name: str, signature: tuple[str, ...], **unusual: int) -> Any:
        """Return the function as Triton describes a compiled kernel."""
        metadata = {"num_ctas": 1, "num_warps": 4, "shared": 48, "launch_pdl": False, "global_scratch_size": 0}
        return SimpleNamespace(
            function=self.address(name),
            metadata=SimpleNamespace(**(metadata | unusual)),
            src=SimpleNamespace(signature=dict(enumerate(signature))),
        )


class Side(NamedTuple):
    """An operand as a backend has them."""

    values: Tensor
    scale: Tensor | None
    scaling: str


def same_key(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers at an address that is a multiple of 256 and of nothing larger that matters."""
    memory = torch.empty(1 << 14, dtype=torch.uint8)
    start = -memory.data_ptr() % 256
    result = memory[start : start + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
    return result.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def scaled(library: Library, factor: int) -> Callable[..., Any]:
    """x·factor + 3 of the first numbers, by a kernel, in a function with views, zeros and torch's own arithmetic."""
    kernel = library.kernel("scale", ("*fp32", "*fp32", "i32", "constexpr"))
    address, launch = library.address("scale"), library.address("launch")

    def function(x: Tensor, side: Side, count: int) -> Any:
        x = x.detach().view(-1)
        out = torch.zeros(count + 2)
        run_kernel(launch, address, (3, count), (x, out[1:]), factor)
        noted = recording()
        if noted is not None:
            noted.launch(kernel, (3, count), (x, out[1:]), (factor, True))
        mean = (side.values.t() @ out[:2].view(2, 1)).add_(out[2])
        return Side(out[1:], mean.t(), side.scaling), (out.view(torch.int32), None), x

    return function


def run_kernel(launch: int, function: int, grid: tuple[int, int], tensors: tuple[Tensor, ...], *numbers: int) -> None:
    """Launch as Python would."""
    values = [ctypes.c_uint64(t.data_ptr()) for t in tensors] + [ctypes.c_uint64(n) for n in (*numbers, 0, 0)]
    places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3)
    assert kind(launch)(function, *grid, 1, 128, 1, 1, 48, None, places, None) == 0


def flat(value: Any) -> list[Any]:
    return [part for each in value for part in flat(each)] if isinstance(value, tuple) else [value]

"""A stand-in for CUDA's driver, in C: kernels are functions of the host, and a launch calls them."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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

"""The GEMM shapes for which a proposal of cuBLASLt's heuristic other than the first was measured to be faster.

The heuristic orders its proposals by a model of the device. For operands with one scale per tensor, the first proposal
is up to 13 % slower than the fastest at some shapes. The choice comes from a file that ``benchmarks.kernels.proposals``
writes, not from a measurement at run time, which would make the bits of a run depend on it. The file is valid only for
the library version and the device that it names.
"""

import json
from collections.abc import Mapping
from pathlib import Path

MEASURED = Path(__file__).with_name("proposals.json")
Choices = Mapping[tuple[int, int, int], int]
"""(rows of A, rows of B, reduction) → index of the proposal for A·Bᵀ with one scale per tensor, fast accumulation and a
bf16 result. The first proposal is used for other shapes."""


def measured_choices(version: int, device: str, path: Path = MEASURED) -> Choices:
    """Return the choices for a cuBLASLt version and a CUDA device name. Empty if the file was measured with others."""
    if not path.exists():
        return {}
    table = json.loads(path.read_text())
    if (table["cublaslt"], table["device"]) != (version, device):
        return {}
    return {(row["a_rows"], row["b_rows"], row["depth"]): row["choice"] for row in table["rows"]}

"""Which of cuBLASLt's proposals runs a GEMM where another than its first was measured to be faster.

The library's heuristic orders its algorithms by a model of the device; for one scale a tensor its first is up to 13 %
slower than the fastest at some shapes. Measuring at run time would make a run's bits depend on the measurement, so that
the choice comes from a file, which ``benchmarks/proposals.py`` writes, and holds for the library and device of that
measurement only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

MEASURED = Path(__file__).with_name("proposals.json")
Choices = Mapping[tuple[int, int, int], int]
"""(rows of A, rows of B, reduction) → number of the proposal for A·Bᵀ with one scale a tensor, fast accumulation, bf16
result. Absent: the first."""


def measured_choices(version: int, device: str, path: Path = MEASURED) -> Choices:
    """The table of a cuBLASLt version on a device, by the name CUDA gives it; empty for any other."""
    if not path.exists():
        return {}
    table = json.loads(path.read_text())
    if (table["cublaslt"], table["device"]) != (version, device):
        return {}
    return {(row["a_rows"], row["b_rows"], row["depth"]): row["choice"] for row in table["rows"]}

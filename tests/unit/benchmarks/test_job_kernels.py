"""The kinds of kernels of a step."""

import json
from pathlib import Path

from benchmarks.jobs.kernels import FILE, summary


def test_a_step_is_summed_by_kind(tmp_path: Path) -> None:
    assert summary(tmp_path) is None
    rows = [["nvjet_a", 3, 1.5], ["memset", 1, 0.25], ["tile_kernel", 2, 4.0], ["nvjet_b", 1, 0.5]]
    (tmp_path / FILE).write_text(json.dumps(rows))
    found = summary(tmp_path)
    assert found is not None
    assert found["ms"] == {"quantisation": 4.0, "gemm": 2.0, "other": 0.25}
    assert found["longest"][0] == {"kernel": "tile_kernel", "launches": 2, "ms": 4.0}

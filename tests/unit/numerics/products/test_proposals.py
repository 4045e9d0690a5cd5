"""Measured choices of cuBLASLt's proposals: when a table does not hold."""

import json
from pathlib import Path

from snip_megatron.numerics.products.proposals import measured_choices


def test_a_table_holds_for_its_library_and_device_only(tmp_path: Path) -> None:
    path = tmp_path / "proposals.json"
    assert measured_choices(130100, "NVIDIA H200", path) == {}
    rows = [{"a_rows": 8192, "b_rows": 4096, "depth": 14336, "choice": 5, "gain": 1.1}]
    path.write_text(json.dumps({"cublaslt": 130100, "device": "NVIDIA H200", "rows": rows}))
    assert measured_choices(130100, "NVIDIA H200", path) == {(8192, 4096, 14336): 5}
    assert measured_choices(130200, "NVIDIA H200", path) == {}
    assert measured_choices(130100, "NVIDIA H100 80GB HBM3", path) == {}

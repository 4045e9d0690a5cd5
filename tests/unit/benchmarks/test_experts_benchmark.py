"""The benchmark of experts at a tiny size: all contenders that a CPU runs compute the same MLP."""

from __future__ import annotations

import torch

from benchmarks.layers.experts import TINY, measure


def test_contenders_agree() -> None:
    (shape,) = TINY.values()
    with torch.compiler.set_stance("force_eager"):
        found = measure(shape, 1, "cpu", ragged=False)
    assert set(found["map"]) == set(found["products"]) == {"fc1", "fc2"}
    assert found["predicted"] > 0
    assert found["mlp"]["bf16"] == found["mlp"]["bf16_torch"]
    assert set(found["errors"]) == set(found["mlp"]) - {"bf16"}
    for name, errors in found["errors"].items():
        least, most = (0.0, 0.01) if name.startswith("bf16") else (0.0 if name == "snip" else 0.001, 0.25)
        assert all(least < error < most for error in errors.values()), name

"""Which backend is picked, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from snip_megatron.config import GEMM_BACKENDS
from snip_megatron.errors import SnipError
from snip_megatron.gemm import selection
from snip_megatron.gemm.backend import REFERENCE
from snip_megatron.gemm.selection import gains, select_backend


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """A machine whose GPU has ``capability``, or none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 9)])
def test_elsewhere_auto_is_the_reference_and_hopper_is_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None
) -> None:
    pretend(monkeypatch, capability)
    found = select_backend("auto")
    assert found.backend is REFERENCE
    assert "sm_90" in found.reason
    with pytest.raises(
        SnipError, match=r"--snip-gemm hopper: needs a Hopper GPU \(sm_90\).*use --snip-gemm auto"
    ) as error:
        select_backend("hopper")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["auto", "hopper"])
def test_on_hopper(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pretend(monkeypatch, (9, 0))
    found = select_backend(name)
    assert found.backend.name == "hopper"
    assert found.reason == "Some GPU, sm_90"
    assert select_backend(name).backend is found.backend
    assert select_backend("reference").backend is REFERENCE


def test_a_torch_without_scaled_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0))
    monkeypatch.delattr(torch.nn.functional, "scaled_mm")
    assert select_backend("auto").backend is REFERENCE
    with pytest.raises(SnipError, match=r"needs torch.nn.functional.scaled_mm, which torch .* does not have"):
        select_backend("hopper")


def test_unknown_name() -> None:
    with pytest.raises(SnipError, match="--snip-gemm fast: unknown; choose one of auto, reference, hopper"):
        select_backend("fast")
    assert GEMM_BACKENDS[0] == "auto"


def test_small_linears_do_not_gain() -> None:
    assert gains(4096, 4096)
    assert gains(2048, 5632)
    assert not gains(1024, 4096)
    assert not gains(512, 512)
    assert not gains(28672, 256)  # measured by nobody


def test_a_measurement_wins_over_the_rule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = tmp_path / "shapes.json"
    measured.write_text(json.dumps({"rows": [{"n": 4096, "k": 1024, "fp8": 0.97}, {"n": 512, "k": 512, "fp8": 1.01}]}))
    monkeypatch.setattr(selection, "_MEASURED", measured)
    selection._table.cache_clear()
    try:
        assert not gains(4096, 1024)
        assert not gains(1024, 4096)
        assert gains(512, 512)
        assert gains(4096, 4096)
    finally:
        selection._table.cache_clear()


def test_what_is_committed_can_be_read() -> None:
    assert all(speedup > 0 for speedup in selection._table().values())

"""Which backend is picked, and what is refused."""

import pytest
import torch

from snip_megatron.numerics.products import emulated, selection, transformer_engine
from snip_megatron.numerics.products.backend import REFERENCE
from snip_megatron.numerics.products.selection import native_backend, resolve_gemm, select_backend
from snip_megatron.precision import Format
from snip_megatron.precision.errors import SnipError


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """Pretend a machine whose GPU has ``capability``, or a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(emulated, "wrong_numbers", lambda *_: None)


def pretend_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_engine.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(transformer_engine, "te_map", lambda: None)


@pytest.mark.parametrize(
    ("capability", "name"), [(None, "reference"), ((7, 5), "reference"), ((8, 0), "emulated"), ((8, 9), "emulated")]
)
def test_elsewhere_auto_emulates_and_hopper_is_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, name: str
) -> None:
    pretend(monkeypatch, capability)
    result = select_backend("auto")
    assert result.backend.name == name
    assert "sm_90" in result.reason
    if name == "reference":
        with pytest.raises(
            SnipError, match=r"--snip-gemm emulated: needs a GPU with bf16 tensor cores \(sm_80 or later\)"
        ):
            select_backend("emulated")
    else:
        assert select_backend("emulated").backend is result.backend
    with pytest.raises(
        SnipError, match=r"--snip-gemm hopper: needs a Hopper GPU \(sm_90\).*use --snip-gemm auto"
    ) as error:
        select_backend("hopper")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["auto", "hopper"])
def test_on_hopper(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pretend(monkeypatch, (9, 0))
    result = select_backend(name)
    assert result.backend.name == "hopper"
    assert result.reason.startswith("Some GPU, sm_90; cuBLASLt")
    assert select_backend(name).backend is result.backend
    assert select_backend("reference").backend is REFERENCE


def test_a_torch_without_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0))
    monkeypatch.setattr(selection, "cublaslt", lambda: None)
    assert select_backend("auto").backend.name == "emulated"
    with pytest.raises(SnipError, match=r"needs cuBLASLt 12.9 or later, which torch .* did not bring"):
        select_backend("hopper")


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_a_device_where_the_emulation_is_wrong(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    pretend(monkeypatch, capability)
    monkeypatch.setattr(emulated, "wrong_numbers", lambda backend, device, formats: f"{[*formats][-1].value} fails")
    monkeypatch.setattr(selection._emulated(), "_in_torch", False)  # and again after the test
    assert "nvfp4 fails: torch emulates, slower than bf16" in select_backend("auto", {Format.NVFP4}).reason
    assert selection._emulated()._in_torch


@pytest.mark.parametrize(
    ("capability", "formats", "te_linears", "gemm", "native"),
    [
        ((10, 0), None, True, "transformer_engine", "blackwell"),
        ((10, 3), {Format.NVFP4, Format.MXFP8, Format.BF16}, True, "transformer_engine", "blackwell"),
        ((10, 0), {Format.FP4}, True, "auto", "blackwell"),  # a study of FP4: emulated
        ((10, 0), None, False, "auto", None),
        ((12, 0), None, True, "auto", None),  # stochastic rounding to NVFP4 gives zeros
        ((9, 0), None, True, "auto", "hopper"),
        ((8, 0), None, True, "auto", None),
    ],
)
def test_auto_is_transformer_engine_on_blackwell(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    formats: set[Format] | None,
    te_linears: bool,
    gemm: str,
    native: str | None,
) -> None:
    pretend(monkeypatch, capability)
    pretend_transformer_engine(monkeypatch)
    assert resolve_gemm("auto", formats, te_linears=te_linears) == gemm
    assert native_backend("auto", te_linears=te_linears) == native
    assert resolve_gemm("emulated", formats, te_linears=te_linears) == "emulated"
    assert native_backend("emulated", te_linears=te_linears) is None


def test_blackwell_checks_transformer_engine_and_probes_by_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (10, 0))
    assert "needs Transformer Engine 2.19" in select_backend("auto").reason
    pretend_transformer_engine(monkeypatch)
    checked = []
    monkeypatch.setattr(selection, "_te_fault", checked.append)
    result = select_backend("transformer_engine", {Format.NVFP4})
    assert result.backend.name == "emulated"
    assert result.reason == "by Transformer Engine's linears on Some GPU, sm_100; probes by emulated"
    assert checked == [{Format.NVFP4}]
    monkeypatch.setattr(selection, "_te_fault", lambda formats: "nvfp4 rounds with a bias")
    with pytest.raises(SnipError, match="--snip-gemm transformer_engine: nvfp4 rounds with a bias; use --snip-gemm em"):
        select_backend("transformer_engine", {Format.NVFP4})
    with pytest.raises(SnipError, match="its linears run bf16, fp8, fp8_tensor, mxfp8, nvfp4 on this card, not fp4"):
        select_backend("transformer_engine", {Format.FP4})

"""Where the Blackwell backend refuses to run, in what words, and that wrong numbers are found."""

import importlib.machinery
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

from snip_megatron.numerics.products import blackwell_support, selection
from snip_megatron.numerics.products.backend import REFERENCE
from snip_megatron.numerics.products.blackwell import BlackwellBackend
from snip_megatron.numerics.products.blackwell_engine import NATIVE, TransformerEngine
from snip_megatron.numerics.products.blackwell_support import availability
from snip_megatron.numerics.products.check import wrong_numbers
from snip_megatron.numerics.products.scaled import ScaledProducts
from snip_megatron.numerics.products.selection import select_backend
from snip_megatron.precision import Format
from snip_megatron.precision.errors import SnipError

from . import emulated_transformer_engine as emulated
from .test_selection import pretend

NVFP4, MXFP8, BF16 = Format.NVFP4, Format.MXFP8, Format.BF16
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Pretends a GPU and an installed Transformer Engine, whose kernels are the emulated ones."""

    def set_up(
        capability: tuple[int, int] | None = (10, 0),
        version: str | None = "2.20.2",
        engine: TransformerEngine | Exception | None = None,
    ) -> None:
        pretend(monkeypatch, capability)
        spec = None if version is None else importlib.machinery.ModuleSpec("transformer_engine", None)
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: spec if name == "transformer_engine" else find(name)
        )
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version)

        def load() -> TransformerEngine:
            if isinstance(engine, Exception):
                raise engine
            return engine or emulated.engine()

        monkeypatch.setattr(blackwell_support, "transformer_engine", load)
        backend = (
            BlackwellBackend(engine, ScaledProducts()) if isinstance(engine, TransformerEngine) else emulated_backend()
        )
        monkeypatch.setattr(selection, "_blackwell", lambda: backend)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(
            selection, "wrong_numbers", lambda backend, device, formats: wrong_numbers(backend, "cpu", formats)
        )

    return set_up


def emulated_backend() -> BlackwellBackend:
    return BlackwellBackend(emulated.engine(), ScaledProducts())


# -- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("pretended", "why"),
    [
        ({"capability": None}, r"needs a Blackwell GPU \(sm_100 or sm_103\) and there is no CUDA device here"),
        ({"capability": (9, 0)}, r"needs a Blackwell GPU \(sm_100 or sm_103\) and Some GPU is sm_90$"),
        ({"capability": (12, 0)}, r"Some GPU is sm_120, where stochastic rounding of gradients to nvfp4 gives zeros"),
        ({"version": None}, r"needs Transformer Engine 2\.9 or later, which is not installed"),
        ({"version": "2.8.0+abc"}, r"needs Transformer Engine 2\.9 or later and 2\.8\.0\+abc is installed"),
        (
            {"engine": OSError("\nlibcudnn.so.9: cannot open\nmore")},
            r"2\.20\.2 cannot be imported \(OSError: libcudnn\.so\.9: cannot open\)$",
        ),
    ],
)
def test_machines_that_cannot(machine: Machine, pretended: dict[str, Any], why: str) -> None:
    machine(**pretended)
    missing = availability()
    assert missing is not None
    with pytest.raises(SnipError, match=f"^--snip-gemm blackwell: .*{why.rstrip('$')}") as error:
        select_backend("blackwell")
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("; use --snip-gemm auto or reference")


@pytest.mark.parametrize("version", ["2.9.0", "2.10", "2.20.2", "3.0.0.dev0+1"])
@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_machines_that_can(machine: Machine, capability: tuple[int, int], version: str) -> None:
    machine(capability, version)
    assert availability({NVFP4, MXFP8, BF16}, sharded=True) is None
    for name in ("auto", "blackwell"):
        found = select_backend(name, {NVFP4, MXFP8})
        assert found.backend.name == "blackwell"
        assert found.reason == f"Some GPU, sm_{capability[0]}{capability[1]}"
    assert select_backend("reference").backend is REFERENCE


def test_formats_without_a_gemm(machine: Machine) -> None:
    machine()
    with pytest.raises(
        SnipError,
        match=r"blackwell: runs nvfp4, mxfp8 and bf16, not fp4, fp8 \(see --snip-formats",
    ):
        select_backend("blackwell", {Format.FP8, Format.FP4, NVFP4})
    with pytest.raises(SnipError, match=r"not nvfp4_46 \(see --snip-formats"):
        select_backend("blackwell", {NVFP4, Format.NVFP4_46})
    found = select_backend("auto", {Format.FP8})
    assert found.backend.name == "emulated"
    assert found.reason == (
        "blackwell: runs nvfp4, mxfp8 and bf16, not fp8"
        " (see --snip-formats, --snip-pin, --snip-map): exact numerics on the bf16 tensor cores of Some GPU, sm_100"
    )


def test_shards_need_an_amax_from_outside(machine: Machine) -> None:
    machine(version="2.16.1", engine=emulated.engine(with_amax=False))
    assert availability({MXFP8}, sharded=True) is None
    assert availability({NVFP4}) is None
    missing = availability({NVFP4}, sharded=True)
    assert "nvfp4 under tensor parallelism needs Transformer Engine 2.17 or later" in missing
    assert availability(sharded=True) == missing


# -- numbers ---------------------------------------------------------------------------------------------------------


def test_gradients_of_zeros_are_found(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Transformer Engine does where the conversion instruction is missing: no error, all zeros."""
    quantise = emulated.NVFP4Quantizer.__call__

    def zeros(self: Any, tensor: torch.Tensor, amax: torch.Tensor | None = None) -> Any:
        return quantise(self, torch.zeros_like(tensor) if self.stochastic_rounding else tensor, amax)

    monkeypatch.setattr(emulated.NVFP4Quantizer, "__call__", zeros)
    machine()
    with pytest.raises(SnipError, match=r"blackwell: nvfp4 gives a signal to noise ratio of -?0\.0 dB in dgrad"):
        select_backend("blackwell", {NVFP4})
    found = select_backend("auto", {NVFP4})
    assert found.backend.name == "emulated"
    assert "in dgrad" in found.reason


def test_rounding_to_nearest_in_place_of_stochastic_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    quantise = emulated.NVFP4Quantizer.__call__

    def nearest(self: Any, tensor: torch.Tensor, amax: torch.Tensor | None = None) -> Any:
        self.stochastic_rounding = False
        return quantise(self, tensor, amax)

    monkeypatch.setattr(emulated.NVFP4Quantizer, "__call__", nearest)
    wrong = wrong_numbers(emulated_backend(), "cpu", NATIVE)
    assert "nvfp4 rounds gradients with a bias" in wrong

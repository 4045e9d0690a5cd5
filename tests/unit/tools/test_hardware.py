"""Backends are run, not believed."""

import pytest
import torch

from snip_megatron.numerics.products import selection
from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.products.selection import Selection
from snip_megatron.tools.checks import hardware
from snip_megatron.tools.checks.check import Status


def test_every_backend_is_named_and_the_reference_is_right():
    found = {check.name: check for check in hardware.check_backends()}
    assert found["reference"].status is Status.OK
    assert "right on this device: fp8, fp4, fp8_tensor, nvfp4, mxfp4, mxfp8" in found["reference"].found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_hopper_says_why():
    found = {check.name: check for check in hardware.check_backends()}
    assert found["hopper"].status is Status.NOTE
    assert "no CUDA device" in found["hopper"].advice
    assert [check.status for check in hardware.check_hardware()] == [Status.NOTE]


def test_times_of_a_card_are_those_of_the_package_and_of_earlier_trainings(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "snip_megatron" / "timings"
    folder.mkdir(parents=True)
    for name in ("h200-0123456789abcdef", "h200-nvl-0123456789abcdef", "h200-nvl-f123456789abcdef"):
        (folder / f"{name}.json").write_text("{}")
    found = [hardware.times_of(card) for card in ("NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA A100-SXM4-80GB")]
    assert [check.status for check in found] == [Status.OK, Status.NOTE, Status.NOTE]
    assert found[0].found == f"the package has those of NVIDIA H200; trainings timed 1 model ({folder})"
    assert "those of NVIDIA H200, the nearest relative; trainings timed 2 models" in found[1].found
    assert "no table of NVIDIA A100-SXM4-80GB; trainings timed 0 models" in found[2].found
    assert all("snip calibrate --out FILE.json" in check.advice for check in found[1:])


class _NotANumber(GemmBackend):
    def multiply(self, gemm, a, b, dtype, out=None):
        return super().multiply(gemm, a, b, dtype, out) * float("nan")


class _WithoutCompiler(GemmBackend):
    """Triton compiles when the first kernel runs, which raises anything."""

    def quantize(self, x, spec, cached=None):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (_NotANumber(), "fp4 gives a signal to noise ratio of nan dB in fprop"),
        (_WithoutCompiler(), "fp8 fails (RuntimeError: Failed to find C compiler.) on this device"),
    ],
)
def test_wrong_numbers_and_failures_fail(monkeypatch, backend, said):
    monkeypatch.setattr(selection, "select_backend", lambda name: Selection(backend, "under test"))
    (found,) = [check for check in hardware.check_backends() if check.name == "auto"]
    assert found.status is Status.FAIL
    assert said in found.found

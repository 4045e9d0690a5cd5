"""The checks of ``snip doctor``: packages, backends, directories."""

import importlib.metadata
from pathlib import Path

import pytest
import torch

from snip_megatron.numerics.products import selection
from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.products.selection import Selection
from snip_megatron.tools import doctor


def test_a_missing_and_an_old_package_say_what_to_install(monkeypatch):
    versions = {"megatron-core": "0.16.1", "wandb": "0.10"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    checks = {check.name: check for check in doctor.check_packages()}
    assert checks["megatron-core"].status == "fail"
    assert "pip install 'megatron-core<0.21,>=0.19.2'" in checks["megatron-core"].advice
    assert (checks["torch"].status, checks["torch"].result) == ("fail", "not installed")
    assert (checks["wandb"].status, checks["apex"].status) == ("note", "note")


def test_a_megatron_that_a_training_would_try_does_not_fail(monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", {"megatron-core": "0.21.0"}.get)
    check = next(check for check in doctor.check_packages() if check.name == "megatron-core")
    assert (check.status, check.result) == ("note", "0.21.0")
    assert "a training tries a newer one" in check.advice


def test_every_backend_is_named_and_the_reference_is_right():
    checks = {check.name: check for check in doctor.check_backends()}
    assert checks["reference"].status == "ok"
    assert "right on this device: fp8, fp4, fp8_tensor, nvfp4, mxfp4, mxfp8" in checks["reference"].result


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_hopper_says_why():
    checks = {check.name: check for check in doctor.check_backends()}
    assert checks["hopper"].status == "note"
    assert "no CUDA device" in checks["hopper"].advice
    assert [check.status for check in doctor.check_hardware()] == ["note"]


def test_times_of_a_card_are_those_of_the_package():
    checks = [doctor.check_times(card) for card in ("NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA A100-SXM4-80GB")]
    assert [check.status for check in checks] == ["ok", "note", "note"]
    assert checks[0].result == "the package has those of NVIDIA H200"
    assert checks[1].result == "the package has those of NVIDIA H200, the nearest relative"
    assert checks[2].result == "the package has no table of NVIDIA A100-SXM4-80GB"
    assert all("snip calibrate --out FILE.json" in check.advice for check in checks[1:])


class _NotANumber(GemmBackend):
    def multiply(self, gemm, a, b, dtype, out=None):
        return super().multiply(gemm, a, b, dtype, out) * float("nan")


class _WithoutCompiler(GemmBackend):
    """Triton compiles when the first kernel runs, which raises anything."""

    def quantize(self, x, spec, cached=None):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")


@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        (_NotANumber(), "fp4 gives a signal to noise ratio of nan dB in fprop"),
        (_WithoutCompiler(), "fp8 fails (RuntimeError: Failed to find C compiler.) on this device"),
    ],
)
def test_wrong_numbers_and_failures_fail(monkeypatch, backend, fault):
    monkeypatch.setattr(selection, "select_backend", lambda name: Selection(backend, "under test"))
    (check,) = [c for c in doctor.check_backends() if c.name == "auto"]
    assert check.status == "fail"
    assert fault in check.result


@pytest.mark.parametrize("where", ["/proc/snip/run", "{file}/run"])
def test_a_folder_that_cannot_be_made_fails(tmp_path, where):
    file = tmp_path / "file"
    file.touch()
    check = doctor.check_disk(Path(where.format(file=file, folder=tmp_path)))
    assert check.status == "fail"
    assert "no folder can be made" in check.result

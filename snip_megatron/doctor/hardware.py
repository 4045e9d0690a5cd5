"""Checks the GPUs, and which GEMM backends give correct results on them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from snip_megatron.doctor.check import Check, attempt, described, fail, note, ok
from snip_megatron.errors import SnipError
from snip_megatron.precision import Gemm

if TYPE_CHECKING:
    from snip_megatron.gemm.backend import GemmBackend

ROOM = "hardware"
GEMM_ROOM = "gemm backends"

_SHAPE = 256
#: Format → largest relative error of Y against float64 that passes. For normal values, rounding to E4M3 gives about
#: .037 and rounding to E2M1 about .16. A wrong layout or scale gives 1 and more.
_TOLERANCE = {"fp8": 0.08, "fp8_tensor": 0.08, "fp4": 0.3, "nvfp4": 0.3, "mxfp4": 0.3, "mxfp8": 0.08}


def check_hardware() -> Iterator[Check]:
    """Check the GPUs that torch sees."""
    if importlib.util.find_spec("torch") is None:
        return
    try:
        import torch
    except Exception as error:  # a library that torch loads can be missing
        yield fail(ROOM, "torch", described(error), "install a torch whose libraries this machine has")
        return

    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        yield note(ROOM, "gpu", f"none ({built})", "training runs on the CPU: for tests and demonstrations only")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        card = f"{properties.name}, sm_{properties.major}{properties.minor}"
        yield ok(ROOM, f"gpu {index}", f"{card}, {memory:.0f} GiB of memory")
    yield times_of(torch.cuda.get_device_name(0))
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    yield ok(ROOM, "nccl", ".".join(map(str, version)))


def times_of(card: str) -> Check:
    """Say which times of GEMMs there are of a card, by its name in torch."""
    from snip_megatron.records.own_table import cache_folder, cached_tables
    from snip_megatron.timing.loading import NoTableError, packaged_table
    from snip_megatron.timing.table import TimingTable

    cached = len(cached_tables(card))
    own = f"trainings timed {cached} model{'s' * (cached != 1)} ({cache_folder()})"
    try:
        device = TimingTable.load(packaged_table(card)).device
    except NoTableError:
        found = f"the package has no table of {card}; {own}"
        return note(ROOM, "times", found, "for snip plan, in a minute: snip calibrate --out FILE.json")
    if device != card:
        found = f"the package has those of {device}, the nearest relative; {own}"
        return note(ROOM, "times", found, "those of this card, in a minute: snip calibrate --out FILE.json")
    return ok(ROOM, "times", f"the package has those of {device}; {own}")


def check_backends() -> Iterator[Check]:
    """Select every backend of ``--snip-gemm``, run it on a small linear and compare the result with float64."""
    try:
        import torch  # noqa: F401
    except Exception:  # :func:`check_hardware` reports it
        return
    from snip_megatron.gemm import BACKENDS

    for name in BACKENDS:
        yield attempt(GEMM_ROOM, name, partial(_backend, name), "mend that; until then use --snip-gemm reference")
    yield from _host_path()


def _host_path() -> Iterator[Check]:
    """Check whether C++ launches the Hopper backend's kernels."""
    from snip_megatron.gemm.selection import why_not_hopper

    if why_not_hopper() is not None:
        return
    from snip_megatron.quantization.kernels.replay_build import replay_extension

    extension, how = replay_extension()
    if extension is not None:
        yield ok(GEMM_ROOM, "host path", how)
    else:
        advice = "install a C++ compiler (g++); without it the results are the same, and small linears take longer"
        yield note(GEMM_ROOM, "host path", how, advice)


def _backend(name: str) -> Check:
    from snip_megatron.gemm.selection import select_backend

    try:
        selection = select_backend(name)
    except SnipError as error:
        return note(GEMM_ROOM, name, "cannot run here", str(error))
    wrong = []
    measured = []
    for fmt, tolerance in _TOLERANCE.items():
        try:
            relative = _fprop_error(selection.backend, fmt)
        except SnipError as refusal:
            measured.append(f"{fmt} refused: {refusal}")
            continue
        measured.append(f"{fmt} {relative:.3f}")
        if not relative < tolerance:  # also true for NaN
            wrong.append(fmt)
    found = f"{selection.backend.name} ({selection.reason}); relative error of Y: {', '.join(measured)}"
    if wrong:
        return fail(
            GEMM_ROOM, name, found, f"{', '.join(wrong)}: wrong numbers; use --snip-gemm reference and report it"
        )
    return ok(GEMM_ROOM, name, found)


def _fprop_error(backend: GemmBackend, fmt_name: str) -> float:
    """Return ‖Y − XWᵀ‖ / ‖XWᵀ‖ of one forward GEMM, with XWᵀ computed in float64."""
    import torch

    from snip_megatron.precision import Format
    from snip_megatron.quantization.operands import OperandSpec

    device = "cuda" if torch.cuda.is_available() else "cpu"
    draws = torch.Generator().manual_seed(0)
    x, w = (torch.randn(_SHAPE, _SHAPE, generator=draws).to(device, torch.bfloat16) for _ in range(2))
    fmt = Format(fmt_name)
    x_side, w_side = (
        backend.quantize(x, OperandSpec(fmt, None))[0],
        backend.quantize(w, OperandSpec(fmt, None, weight=True))[0],
    )
    y = backend.multiply(Gemm.FPROP, x_side, w_side, torch.bfloat16)
    truth = x.double() @ w.double().T
    return float((y.double() - truth).norm() / truth.norm())

"""Selection of the GEMM backend (``--snip-gemm``)."""

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from snip_megatron.numerics.products import BACKENDS, LIBRARIES
from snip_megatron.numerics.products.backend import REFERENCE, REPLAYED, GemmBackend
from snip_megatron.numerics.products.check import wrong_numbers
from snip_megatron.numerics.products.cublaslt import cublaslt, measured_choices
from snip_megatron.numerics.products.transformer_engine import (
    on_blackwell,
    transformer_engine_gemms,
    why_not_transformer_engine,
)
from snip_megatron.numerics.quantize.kernels import has_triton
from snip_megatron.precision import Format
from snip_megatron.precision.errors import SnipError

_AMPERE = (8, 0)
_HOPPER = (9, 0)
_SAMPLE = (Format.FP8, Format.NVFP4, Format.MXFP8)  # one of each kind of scale


@dataclass(frozen=True)
class Selection:
    """A backend, and the reason for the log."""

    backend: GemmBackend
    reason: str


def select_backend(
    name: str,
    formats: Collection[Format] | None = None,
    *,
    library: str = "auto",
    checks: bool = True,
) -> Selection:
    """Return the backend for a value of ``--snip-gemm``.

    Raises SnipError if the name is unknown, or the backend cannot run on this machine.

    Args:
        name: one of ``BACKENDS``. "auto" selects the fastest backend that runs on this machine and keeps the numbers of
            the map. "transformer_engine" selects the same, for probes and measuring passes.
        formats: the formats that GEMMs will use. None if they are unknown.
        library: ``gemm_library``, one of ``LIBRARIES``.
        checks: whether the numbers of the backend are checked now, and C++ launches its kernels. A training does both
            when its kernels are compiled, by :meth:`GemmBackend.check` and :func:`launch_from_cpp`.
    """
    if name not in BACKENDS:
        raise SnipError(f"--snip-gemm {name}: unknown; choose one of {', '.join(BACKENDS)}")
    if library not in LIBRARIES:
        raise SnipError(f"--snip-settings gemm_library={library}: unknown; choose one of {', '.join(LIBRARIES)}")
    selection = _select(name, formats, library)
    if not checks:
        return selection
    backend, reasons = selection.backend, [selection.reason]
    checked = _SAMPLE if formats is None and backend.name == "emulated" else formats or ()
    reasons.append(backend.check("cuda", checked) or "")
    if backend.name == "hopper":
        reasons.append(launch_from_cpp(backend))
    return replace(selection, reason="; ".join(filter(None, reasons)))


def resolve_gemm(name: str, formats: Collection[Format] | None, *, te_linears: bool) -> str:
    """Return "transformer_engine" in place of "auto" on a Blackwell card where Transformer Engine runs ``formats``
    (None: unknown) in a model with its linears (``te_linears``), and otherwise ``name``.
    """
    if name == "auto" and te_linears and on_blackwell() and why_not_transformer_engine(formats) is None:
        return "transformer_engine"
    return name


def native_backend(name: str, *, te_linears: bool = False) -> str | None:
    """Return "hopper" or "blackwell" if GEMMs multiply the formats of these cards natively under ``--snip-gemm name``,
    and None if formats are emulated. ``te_linears``: see :func:`resolve_gemm`.
    """
    if on_blackwell():
        return "blackwell" if resolve_gemm(name, None, te_linears=te_linears) == "transformer_engine" else None
    return "hopper" if name in ("auto", "hopper", "transformer_engine") and why_not_hopper() is None else None


def _select(name: str, formats: Collection[Format] | None, library: str) -> Selection:
    if name == "reference":
        return Selection(REFERENCE, "as asked")
    if name == "transformer_engine":
        refusal = why_not_transformer_engine(formats)
        if refusal is None and on_blackwell():
            refusal = _te_fault(frozenset(formats or (Format.MXFP8, Format.NVFP4)))
        if refusal is not None:
            instead = "emulated" if on_blackwell() else "auto"
            raise SnipError(f"--snip-gemm transformer_engine: {refusal}; use --snip-gemm {instead}")
        selection = _select("auto", formats, library)
        probes = selection.backend.name
        return replace(selection, reason=f"by Transformer Engine's linears on {_card()}; probes by {probes}")
    reason = why_not_hopper()
    if reason is None and name != "emulated":
        backend, products = _hopper(library)
        return Selection(backend, f"{_card()}; {products}")
    if name == "hopper":
        raise SnipError(f"--snip-gemm hopper: {reason}; use --snip-gemm auto or reference")
    refusal = _why_not_emulated()
    if name == "emulated":
        if refusal is not None:
            raise SnipError(f"--snip-gemm emulated: {refusal}; use --snip-gemm auto or reference")
        reason = "as asked"
    elif on_blackwell():
        reason = why_not_transformer_engine(formats) or "these are no linears of Transformer Engine"
    if refusal is not None:
        return Selection(REFERENCE, f"{reason}: emulation, slower than bf16")
    return Selection(_emulated(), f"{reason}: exact numerics on the bf16 tensor cores of {_card()}")


def _card() -> str:
    capability = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, sm_{capability[0]}{capability[1]}"


@functools.cache
def _te_fault(formats: frozenset[Format]) -> str | None:
    """Return what is wrong with Transformer Engine's GEMMs of ``formats`` on this device, or None."""
    with torch.random.fork_rng([torch.cuda.current_device()]):  # gradients are rounded with the default generator
        return wrong_numbers(transformer_engine_gemms(), "cuda", [fmt for fmt in Format if fmt in formats])


def _why_not_emulated() -> str | None:
    return _why_not("a GPU with bf16 tensor cores (sm_80 or later)", lambda capability: capability >= _AMPERE)


def _why_not(card: str, fits: Callable[[tuple[int, int]], bool]) -> str | None:
    """Return why kernels for a ``card`` cannot run on this machine, or None if they can."""
    if not torch.cuda.is_available():
        return f"needs {card} and there is no CUDA device here"
    if not fits(torch.cuda.get_device_capability()):
        return f"needs {card} and this is {_card()}"
    return None if has_triton() else "needs triton, which cannot be imported here"


@functools.cache
def _emulated() -> GemmBackend:
    from snip_megatron.numerics.products.emulated import EmulatedBackend
    from snip_megatron.numerics.products.tiled_kernel import multiply
    from snip_megatron.numerics.quantize.kernels.exact import quantize_exact

    return EmulatedBackend(quantize_exact, cublaslt(), multiply)


def why_not_hopper() -> str | None:
    """Return why the Hopper backend cannot run on this machine, or None if it can."""
    reason = _why_not("a Hopper GPU (sm_90)", lambda capability: capability == _HOPPER)
    if reason is None and cublaslt() is None:
        return f"needs cuBLASLt 12.9 or later, which torch {torch.__version__} did not bring"
    return reason


@functools.cache
def _hopper(library_name: str) -> tuple[GemmBackend, str]:
    """Return the backend, and the names of the libraries that multiply.

    Raises SnipError if ``library_name`` is "deepgemm", and DeepGEMM cannot be loaded.
    """
    # Triton is installed only on machines with a GPU.
    from snip_megatron.numerics.products.deepgemm import deepgemm, grouped_library
    from snip_megatron.numerics.products.grouped_wgrad import add_wgrad
    from snip_megatron.numerics.products.hopper import HopperBackend
    from snip_megatron.numerics.quantize.kernels import quantize as triton_quantize
    from snip_megatron.numerics.quantize.kernels import swiglu as triton_swiglu

    library, deep_gemm, products = cublaslt(), None, "cuBLASLt"
    assert library is not None
    if library_name != "cublas":
        deep_gemm, reason = deepgemm()
        products = reason if deep_gemm is not None else f"{products}; {reason}"
    if library_name == "deepgemm" and deep_gemm is None:
        raise SnipError(f"--snip-settings gemm_library={library_name}: it cannot be used here: {products}; use auto")
    backend = HopperBackend(
        triton_quantize,
        library,
        choices=measured_choices(library.version, torch.cuda.get_device_name()),
        deepgemm=deep_gemm,
        fallback=_emulated(),
        activations=triton_swiglu,
        groups=None if deep_gemm is None else grouped_library(),
        add_wgrad=add_wgrad,
    )
    return backend, products


def launch_from_cpp(backend: GemmBackend, formats: Collection[Format] = (Format.FP4, Format.FP8_TENSOR)) -> str:
    """Let C++ repeat what ``backend`` does on the device, if it can, and return a phrase for the log.

    The replayed numbers of ``formats`` are checked.
    """
    from snip_megatron.numerics.quantize.kernels.replay import replay_extension

    extension, host = replay_extension()
    if extension is None or backend.replayed:
        return host
    fault = wrong_numbers(replay(backend, extension), "cuda", formats)
    if fault is None:
        return host
    for name in backend.replayed:
        delattr(backend, name)
    backend.replayed = {}
    return f"Python launches kernels (C++: {fault})"


def replay(backend: GemmBackend, extension: Any) -> GemmBackend:
    """Let C++ repeat what the methods of ``backend`` do on the device, and return the backend."""
    from snip_megatron.numerics.quantize.kernels.replay import Replayed

    backend.replayed = {name: Replayed(extension, getattr(backend, name)) for name in REPLAYED}
    for name, replayed in backend.replayed.items():
        setattr(backend, name, replayed.call)
    return backend

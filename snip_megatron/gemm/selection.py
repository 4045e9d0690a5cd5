"""Which backend runs the GEMMs (``--snip-gemm``), and which linears are too small to gain from it."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from snip_megatron.config import GEMM_BACKENDS
from snip_megatron.errors import SnipError
from snip_megatron.gemm.backend import REFERENCE, GemmBackend
from snip_megatron.gemm.blackwell_support import availability, is_blackwell, wrong_numbers
from snip_megatron.precision import Format

_HOPPER = (9, 0)
_MEASURED = Path(__file__).with_name("shapes.json")

# Below this N·K/(N+K) a linear that nobody measured is taken to lose. On one H200 (shapes.json) the smallest that gains
# has 1,502 (2048→5632), the largest that does not 1,024 (2048→2048): in between is unknown. Device speeds alone would
# put the break-even at 412 (bf16 670, fp8 1080 and 910 TFLOP/s, quantisation 4.06·(N+K) bytes a token at 3.2 TB/s); the
# rest is the host, which launches more kernels.
_BREAK_EVEN = 1500.0


@dataclass(frozen=True)
class Selection:
    """A backend and, in words for the log, why."""

    backend: GemmBackend
    reason: str


def select_backend(name: str, formats: Collection[Format] | None = None, *, tensor_parallel: bool = False) -> Selection:
    """The backend of ``--snip-gemm``. ``auto`` is the fastest that gives the map's numbers on this machine.

    Args:
        formats: that GEMMs will be asked for; None: unknown.
        tensor_parallel: whether weights are sharded.

    Raises:
        SnipError: an unknown name, or a backend that this machine cannot run.
    """
    if name not in GEMM_BACKENDS:
        raise SnipError(f"--snip-gemm {name}: unknown; choose one of {', '.join(GEMM_BACKENDS)}")
    if name == "reference":
        return Selection(REFERENCE, "as asked")
    if name == "blackwell" or (name == "auto" and is_blackwell()):
        return _select_blackwell(name, formats, tensor_parallel)
    missing = _why_not_hopper()
    if missing is None:
        return Selection(_hopper(), f"{torch.cuda.get_device_name()}, sm_90")
    if name == "hopper":
        raise SnipError(f"--snip-gemm hopper: {missing}; use --snip-gemm auto or reference")
    return Selection(REFERENCE, f"{missing}: emulation, slower than bf16")


def _select_blackwell(name: str, formats: Collection[Format] | None, tensor_parallel: bool) -> Selection:
    missing = availability(formats, sharded=tensor_parallel)
    if missing is None:
        missing = wrong_numbers(_blackwell(), torch.device("cuda", torch.cuda.current_device()))
    if missing is None:
        capability = torch.cuda.get_device_capability()
        return Selection(_blackwell(), f"{torch.cuda.get_device_name()}, sm_{capability[0]}{capability[1]}")
    if name == "auto":
        return Selection(REFERENCE, f"blackwell: {missing}: emulation, slower than bf16")
    raise SnipError(f"--snip-gemm blackwell: {missing}; use --snip-gemm auto or reference")


@functools.cache
def _blackwell() -> GemmBackend:
    from snip_megatron.gemm.blackwell import BlackwellBackend
    from snip_megatron.gemm.blackwell_engine import transformer_engine
    from snip_megatron.gemm.cublaslt import cublaslt
    from snip_megatron.gemm.scaled import ScaledProducts

    return BlackwellBackend(transformer_engine(), ScaledProducts(library=cublaslt()))


def _why_not_hopper() -> str | None:
    if not torch.cuda.is_available():
        return "needs a Hopper GPU (sm_90) and there is no CUDA device here"
    capability = torch.cuda.get_device_capability()
    if capability != _HOPPER:
        name = torch.cuda.get_device_name()
        return f"needs a Hopper GPU (sm_90) and {name} is sm_{capability[0]}{capability[1]}"
    if not hasattr(torch.nn.functional, "scaled_mm"):
        return f"needs torch.nn.functional.scaled_mm, which torch {torch.__version__} does not have"
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which cannot be imported here"
    return None


@functools.cache
def _hopper() -> GemmBackend:
    # Triton is only there on machines with a GPU.
    from snip_megatron.gemm.cublaslt import cublaslt
    from snip_megatron.gemm.hopper import HopperBackend
    from snip_megatron.gemm.proposals import measured_choices
    from snip_megatron.gemm.scaled import ScaledProducts
    from snip_megatron.quantization import triton_quantize

    library = cublaslt()
    choices = {} if library is None else measured_choices(library.version, torch.cuda.get_device_name())
    return HopperBackend(triton_quantize, ScaledProducts(library=library, choices=choices))


# -- small linears -------------------------------------------------------------------------------------------------
def gains(n: int, k: int) -> bool:
    """Whether a linear with weight [N, K] is faster in fp8 than in bf16, forward, backward and quantisation together.

    As measured where ``shapes.json`` beside this file has the shape (either way round: the three GEMMs are the same),
    else by the rule above. At 8,192 tokens; fewer gain less.
    """
    measured = _table().get((min(n, k), max(n, k)))
    return n * k / (n + k) >= _BREAK_EVEN if measured is None else measured > 1.0


@functools.cache
def _table() -> dict[tuple[int, int], float]:
    """(smaller, larger edge) → speedup of fp8 over bf16; written by ``benchmarks/linear.py --small``."""
    if not _MEASURED.exists():
        return {}
    rows = json.loads(_MEASURED.read_text())["rows"]
    return {(min(row["n"], row["k"]), max(row["n"], row["k"])): float(row["fp8"]) for row in rows}

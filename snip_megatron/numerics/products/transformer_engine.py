"""Transformer Engine's linears under a map (``--snip-gemm transformer_engine``): where they run, and their GEMMs."""

import functools
import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.quantize.operands import CachedPair, OperandPair, OperandSpec
from snip_megatron.precision import Format, Formats, Gemm, LinearId
from snip_megatron.precision.errors import first_line

QUANTIZERS = (Format.BF16, Format.FP8, Format.FP8_TENSOR, Format.MXFP8, Format.NVFP4)
"""Formats that a quantizer of Transformer Engine has."""

FACTORY_MODULE = "snip_te_map"  # name of the module that an exported map is

_FACTORY_TABLE = "FORMATS: dict[str, tuple[str, str, str]] = {}"
"""The line of its source file that the formats of the map replace."""

_HOPPER = (Format.BF16, Format.FP8, Format.FP8_TENSOR)
_LAYOUTS = {Gemm.FPROP: "TN", Gemm.DGRAD: "NN", Gemm.WGRAD: "NT"}


def te_map() -> ModuleType:
    """Return ``snip_te_map``, which is both imported by a run and the text of an exported map.

    Raises ImportError, or whatever the import of Transformer Engine raises.
    """
    from snip_megatron.numerics.products import snip_te_map

    return snip_te_map


def factory_source(formats: Mapping[LinearId, Formats], source: str) -> str:
    """Return the text of ``snip_te_map`` for a map. ``source`` names the map in a comment."""
    rows = [
        f"    {json.dumps(str(linear))}: ({', '.join(json.dumps(fmt.value) for fmt in formats_of_linear)}),"
        for linear, formats_of_linear in formats.items()
    ]
    table = "\n".join([f"# Written from {json.dumps(source)}.", _FACTORY_TABLE[:-1], *rows, "}"])
    template = Path(__file__).with_name(f"{FACTORY_MODULE}.py")
    return template.read_text(encoding="utf-8").replace(_FACTORY_TABLE, table)


def import_fault() -> str | None:
    """Return why Transformer Engine cannot be imported, as the end of a sentence, or None.

    Without a CUDA device nothing is imported: the libraries of the host on which a job is checked may differ.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return "needs Transformer Engine, which is not installed"
    if not torch.cuda.is_available():
        return None
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # an incompatible shared object may raise anything
        return f"needs Transformer Engine, whose import fails ({import_error(error)})"
    return None


def import_error(error: Exception) -> str:
    """Return an error of the import of Transformer Engine in one line. If it is of cuDNN, the line says what to do."""
    line = first_line(error)
    if "libcudnn" not in str(error):
        return line
    with open("/proc/self/maps") as maps:  # the files that this process has mapped
        paths = ["/" + line.strip().partition("/")[2] for line in maps if "libcudnn" in line]
    loaded = sorted({os.path.dirname(path) for path in paths})
    package = importlib.util.find_spec("nvidia.cudnn") if importlib.util.find_spec("nvidia") else None
    folders = [] if package is None else list(package.submodule_search_locations or ())
    folder = os.path.join(folders[0], "lib") if folders else "the folder of torch's cuDNN"
    return (
        f"{line}; libraries of two versions of cuDNN meet, and those in {', '.join(loaded)} are loaded:"
        f" put {folder} first in LD_LIBRARY_PATH, or import transformer_engine before other code uses cuDNN"
    )


def on_blackwell() -> bool:
    """Return whether the CUDA device is of compute capability 10.0 or above."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)


def formats_on_card() -> tuple[Format, ...]:
    """Return the formats that Transformer Engine's linears run on this Hopper or Blackwell card."""
    return QUANTIZERS if on_blackwell() else _HOPPER


def why_not_transformer_engine(formats: Collection[Format] | None) -> str | None:
    """Return why Transformer Engine's linears cannot run ``formats`` (None: unknown) on this machine, or None."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        return "needs a Hopper or Blackwell GPU, and there is none here"
    capability = torch.cuda.get_device_capability()
    if capability >= (11, 0):  # stochastic rounding to E2M1 returns zeros there, and MXFP8 lacks layouts on sm_120
        return f"needs sm_90, sm_100 or sm_103, and {torch.cuda.get_device_name()} is sm_{capability[0]}{capability[1]}"
    if importlib.util.find_spec("transformer_engine") is None:
        return "needs Transformer Engine 2.19 or later, which is not installed"
    try:
        te_map()
    except Exception as error:  # an incompatible shared object may raise anything
        return f"Transformer Engine cannot be used ({import_error(error)})"
    supported = formats_on_card()
    missing = sorted(fmt.value for fmt in formats or () if fmt not in supported)
    if missing:
        listed = ", ".join(fmt.value for fmt in supported)
        return f"its linears run {listed} on this card, not {', '.join(missing)} (see --snip-formats, --snip-pin)"
    return None


class TransformerEngineGemms(GemmBackend):
    """The quantizers and the GEMMs that Transformer Engine's linears run, one by one.

    A run times them for its budget, and checks their numbers before training. The linears themselves call them inside
    Transformer Engine. Gradients are rounded with draws of CUDA's default generator, whatever the keys of a spec.

    Args:
        quantizer: returns a new quantizer for a format and "input", "weight" or "grad_output".
        general_gemm: Transformer Engine's function of this name.
    """

    name = "transformer_engine"

    def __init__(self, quantizer: Callable[[str, str], Any], general_gemm: Callable[..., Any]) -> None:
        self._quantizer, self._general_gemm = functools.cache(quantizer), general_gemm

    def quantize(self, x: Tensor, spec: OperandSpec, cached: CachedPair | None = None) -> OperandPair:
        """See the base class. If both formats are equal, one call quantises for both GEMMs."""
        tensor = "weight" if spec.weight else "input" if spec.keys is None else "grad_output"

        def quantized(fmt: Format | None, *, rowwise: bool, columnwise: bool) -> Any:
            if fmt is None or fmt is Format.BF16:
                return None if fmt is None else x
            quantizer = self._quantizer(fmt.value, tensor)
            # Per-tensor quantisation writes the columnwise representation beside the rowwise one only.
            quantizer.set_usage(rowwise=rowwise or fmt is Format.FP8_TENSOR, columnwise=columnwise)
            # As in the linears: no tensor subclass for autograd, and scales in the layout of the GEMM.
            quantizer.internal = quantizer.optimize_for_gemm = True
            with torch.no_grad():
                return quantizer(x)

        both = spec.rowwise is spec.columnwise
        row = quantized(spec.rowwise, rowwise=True, columnwise=both)
        return row, row if both else quantized(spec.columnwise, rowwise=False, columnwise=True)

    def multiply(self, gemm: Gemm, a: Any, b: Any, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """See the base class. ``general_gemm`` names layouts as a column-major library does."""
        product: Tensor = self._general_gemm(
            b,
            a,
            layout=_LAYOUTS[gemm],
            out_dtype=dtype if out is None else out.dtype,
            out=out,
            accumulate=out is not None,
            grad=gemm is not Gemm.FPROP,
            use_split_accumulator=gemm is not Gemm.FPROP,
        )[0]
        return product


@functools.cache
def transformer_engine_gemms() -> TransformerEngineGemms:
    """Return the GEMMs of the installed Transformer Engine. Raises whatever its import raises."""
    from transformer_engine.pytorch.cpp_extensions.gemm import general_gemm

    return TransformerEngineGemms(te_map().quantizer_of_format, general_gemm)

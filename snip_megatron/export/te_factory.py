"""Writes a precision map as a Python module with a quantizer factory for Transformer Engine's ``CustomRecipe``.

A GEMM reads both operands in its own format, and a tensor has a row-wise and a column-wise representation. The three
formats of a linear therefore determine the two formats of each of its tensors: fprop reads W row-wise and X row-wise,
dgrad W column-wise and G row-wise, wgrad X column-wise and G column-wise. Every map can be expressed, except formats
without a quantizer. Neither Megatron nor Transformer Engine is needed.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from snip_megatron.errors import SnipError
from snip_megatron.export.te_precision import load_map, write_files
from snip_megatron.precision import Format, Gemm, LinearId, PrecisionMap

MODULE = "snip_te_map"
"""Name of the written module."""

QUANTIZERS = (
    Format.BF16,
    Format.FP8,
    Format.FP8_TENSOR,
    Format.MXFP8,
    Format.NVFP4,
)
"""Formats that a quantizer of Transformer Engine has."""

Formats = tuple[Format, Format, Format]
"""Formats of fprop, dgrad and wgrad."""

_MODULE = '''\
"""Quantizer factory for Transformer Engine's CustomRecipe, written by ``snip export --format te``.

Interface: that of Transformer Engine 2.19 and 2.20 (QuantizerRole, HybridQuantizer, IdentityQuantizer). It is
experimental there and may change in later releases.

With Megatron-LM, this file's folder in PYTHONPATH and a model without --fp8-param-gather:
  --transformer-impl transformer_engine --fp8-format e4m3 --fp8-recipe custom
  --fp8-quantizer-factory @MODULE@.quantizer_factory
Megatron does not tell Transformer Engine the names of its linears. The model provider must therefore call
``@MODULE@.name_linears(model)`` for every model chunk before it returns it.
"""

import torch
import transformer_engine.pytorch as te

if not hasattr(te, "HybridQuantizer"):
    raise ImportError("@MODULE@ needs Transformer Engine 2.19 or later: this one has no HybridQuantizer")

# Written from @SOURCE@.
# Decoder linear, layers counted from 0 over the whole model: formats of fprop, dgrad and wgrad.
FORMATS = {
@FORMATS@
}

# Tensor of a linear: the GEMMs that read its rowwise and its columnwise representation, as positions in FORMATS.
READERS = {"input": (0, 2), "weight": (0, 1), "grad_output": (1, 2)}


def quantizer_factory(role):
    """Return a new quantizer for the tensor that ``role`` describes. All that FORMATS does not name stays in bf16.

    Raises RuntimeError for a linear without a name of name_linears: Transformer Engine calls it Layer_<number>.
    """
    if role is None or role.module_type not in ("linear", "grouped_linear"):
        return te.IdentityQuantizer()
    if role.name not in FORMATS and not role.name.startswith("bf16."):
        raise RuntimeError(f"the linear {role.name} is not named: call @MODULE@.name_linears(model) in the model"
                           " provider, and train without --fp8-param-gather")
    if role.name not in FORMATS or role.tensor_type not in READERS:
        return te.IdentityQuantizer()
    row, column = (FORMATS[role.name][gemm] for gemm in READERS[role.tensor_type])
    if row == column:
        return _quantizer(row, role.tensor_type)
    return te.HybridQuantizer(
        rowwise_quantizer=_quantizer(row, role.tensor_type),
        columnwise_quantizer=_quantizer(column, role.tensor_type),
        columnwise_source="original",
    )


def name_linears(model):
    """Name the linears of a model chunk of Megatron as FORMATS does. Returns the number of linears that it names.

    Raises ValueError if a layer is not one of the map, or if a linear is not one of Transformer Engine 2.19 or later.
    """
    while hasattr(model, "module"):  # DDP, Float16Module
        model = model.module
    named = set()
    for stack in ("decoder", "mtp"):
        for layer in getattr(getattr(model, stack, None), "layers", ()):
            prefix = f"{stack}.layers.{layer.layer_number - 1}."
            names = [name for name in FORMATS if name.startswith(prefix)]
            if not names and stack == "decoder":
                raise ValueError(f"{prefix[:-1]} is not in the map that @MODULE@ was written from")
            for name in names:
                for linear in _modules(layer, name.removeprefix(prefix)):
                    if not hasattr(linear, "get_quantizer_roles"):
                        found = type(linear).__name__
                        raise ValueError(f"{name} is {found}, no linear of Transformer Engine 2.19 or later")
                    linear.name = name
                    named.add(linear)
    for path, module in model.named_modules():  # other linears stay in bf16, as the output layer does
        if hasattr(module, "get_quantizer_roles") and module not in named:
            module.name = f"bf16.{path}"
    return len(named)


def _modules(layer, path):
    """Return the modules of one name: one of each local expert where experts are apart."""
    owner, _, last = path.rpartition(".")
    experts = getattr(layer.get_submodule(owner), "local_experts", None)
    return [layer.get_submodule(path)] if experts is None else [getattr(expert, last) for expert in experts]


def _quantizer(name, tensor):
    """Return a quantizer with the numerics that the map was chosen for: E4M3, and G of nvfp4 rounded stochastically."""
    weight = tensor == "weight"
    if name == "bf16":
        return te.IdentityQuantizer()
    if name == "mxfp8":
        return te.MXFP8Quantizer(te.DType.kFloat8E4M3)
    if name == "fp8_tensor":
        return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, torch.device("cuda"))
    if name == "fp8":  # blocks of 128x128 for weights, else tiles of 1x128; Blackwell knows powers of two only
        blackwell = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10
        return te.Float8BlockQuantizer(
            te.DType.kFloat8E4M3, rowwise=True, columnwise=True, force_pow_2_scales=blackwell,
            block_scaling_dim=2 if weight else 1,
        )
    if name == "nvfp4":  # without a Hadamard transform, whose signs are not the map's
        return te.NVFP4Quantizer(
            te.DType.kFloat4E2M1, with_rht=False, with_post_rht_amax=False,
            with_2d_quantization=weight,
            stochastic_rounding=tensor == "grad_output",
        )
    raise ValueError(f"@MODULE@ has no quantizer for {name}")
'''


def map_formats(precision_map: PrecisionMap, where: str) -> dict[LinearId, Formats]:
    """Return the formats of every linear that the map names. Others run in bf16.

    Raises:
        SnipError: If the map names no linear, or a format without a quantizer.
    """
    named = precision_map.linears()
    if not named:
        raise SnipError(f"{where}: names no linear")
    formats = {linear: _three(precision_map, linear) for linear in named}
    known = ", ".join(fmt.value for fmt in QUANTIZERS)
    for linear, three in formats.items():
        for gemm, fmt in zip(Gemm, three, strict=True):
            if fmt not in QUANTIZERS:
                raise SnipError(
                    f"{where}: {linear} runs {gemm.value} in {fmt.value}, for which Transformer Engine has no quantizer"
                    f" (it has them for {known}): choose the map among these (--snip-formats)"
                )
    return formats


def _three(precision_map: PrecisionMap, linear: LinearId) -> Formats:
    fprop, dgrad, wgrad = (precision_map.format_of(str(linear), gemm) for gemm in Gemm)
    return fprop, dgrad, wgrad


def factory_source(formats: dict[LinearId, Formats], source: str) -> str:
    """Return the text of the module. ``source`` names the map in a comment."""
    lines = [
        f"    {json.dumps(str(linear))}: ({', '.join(json.dumps(fmt.value) for fmt in three)}),"
        for linear, three in formats.items()
    ]
    text = _MODULE.replace("@MODULE@", MODULE)
    # A path may hold any text, and so it goes in last and as one line.
    return text.replace("@FORMATS@", "\n".join(lines)).replace("@SOURCE@", json.dumps(source))


# -- the command ---------------------------------------------------------------------------------------------------
def add_arguments(group: object) -> None:
    """Add nothing: ``snip export --format te`` has no arguments of its own."""


def run(args: argparse.Namespace) -> int:
    """Write the module, and print its path and how Megatron loads it. Returns the exit code.

    Raises:
        SnipError: If the map cannot be expressed, or if the folder cannot be written.
    """
    formats = map_formats(load_map(args.source), str(args.source))
    path: Path = args.out / f"{MODULE}.py"
    write_files(args.out, {path.name: factory_source(formats, str(args.source))})
    count = Counter(fmt for three in formats.values() for fmt in three)
    gemms = ", ".join(f"{count[fmt]} in {fmt.value}" for fmt in QUANTIZERS if count[fmt])
    print(f"{len(formats)} linears; GEMMs: {gemms}")
    print(
        "Megatron: --transformer-impl transformer_engine --fp8-format e4m3 --fp8-recipe custom"
        f" --fp8-quantizer-factory {MODULE}.quantizer_factory"
    )
    print(f"with {args.out} in PYTHONPATH, and {MODULE}.name_linears(model) called in the model provider")
    print(path)
    return 0

"""Quantizer factory for Transformer Engine's CustomRecipe, written by ``snip export --format te``.

Interface: that of Transformer Engine 2.19 and 2.20 (QuantizerRole, HybridQuantizer, IdentityQuantizer). It is
experimental there and may change in later releases.

With Megatron-LM, this file's folder in PYTHONPATH and a model without --fp8-param-gather:
  --transformer-impl transformer_engine --fp8-format e4m3 --fp8-recipe custom
  --fp8-quantizer-factory snip_te_map.quantizer_factory
Megatron does not tell Transformer Engine the names of its linears. The model provider must therefore call
``snip_te_map.name_linears(model)`` for every model chunk before it returns it.
"""

from __future__ import annotations

from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe, MMParams

if not hasattr(te, "HybridQuantizer"):
    raise ImportError("snip_te_map needs Transformer Engine 2.19 or later: this one has no HybridQuantizer")

# Decoder linear, layers counted from 0 over the whole model: formats of fprop, dgrad and wgrad.
FORMATS: dict[str, tuple[str, str, str]] = {}

# Tensor of a linear: the GEMMs that read its rowwise and its columnwise representation, as positions in FORMATS.
READERS = {"input": (0, 2), "weight": (0, 1), "grad_output": (1, 2)}


def quantizer_factory(role: Any) -> Any:
    """Return a new quantizer for the tensor that ``role`` describes. All that FORMATS does not name stays in bf16.

    Raises RuntimeError for a linear without a name of name_linears: Transformer Engine calls it Layer_<number>.
    """
    if role is None or role.module_type not in ("linear", "grouped_linear"):
        return te.IdentityQuantizer()
    if role.name not in FORMATS and not role.name.startswith("bf16."):
        raise RuntimeError(
            f"the linear {role.name} is not named: call snip_te_map.name_linears(model) in the model provider, and"
            " train without --fp8-param-gather"
        )
    return quantizer(FORMATS.get(role.name, ("bf16",) * 3), role.tensor_type)


def quantizer(formats: tuple[str, str, str], tensor: str) -> Any:
    """Return a new quantizer for a tensor of a linear whose fprop, dgrad and wgrad have ``formats``."""
    if tensor not in READERS:
        return te.IdentityQuantizer()
    row, column = (formats[gemm] for gemm in READERS[tensor])
    if row == column:
        return quantizer_of_format(row, tensor)
    hybrid = te.HybridQuantizer(
        rowwise_quantizer=quantizer_of_format(row, tensor),
        columnwise_quantizer=quantizer_of_format(column, tensor),
        columnwise_source="original",
    )
    if column == "fp8_tensor":  # its columnwise representation is written beside the rowwise one only
        hybrid.columnwise_quantizer.set_usage(rowwise=True, columnwise=True)
    return hybrid


def name_linears(model: Any) -> int:
    """Name the linears of a model chunk of Megatron as FORMATS does. Returns the number of linears that it names.

    Raises ValueError if a layer is not one of the map, or if a linear is not one of Transformer Engine 2.19 or later.
    """
    if any(formats[0] == "fp8" for formats in FORMATS.values()):
        # cuBLAS multiplies tiles in no other way. Grouped linears ask the recipe, which is Megatron's own object.
        CustomRecipe.fp8_gemm_fprop = MMParams(use_split_accumulator=True)
    while hasattr(model, "module"):  # DDP, Float16Module
        model = model.module
    named = set()
    for stack in ("decoder", "mtp"):
        for layer in getattr(getattr(model, stack, None), "layers", ()):
            prefix = f"{stack}.layers.{layer.layer_number - 1}."
            names = [name for name in FORMATS if name.startswith(prefix)]
            if not names and stack == "decoder":
                raise ValueError(f"{prefix[:-1]} is not in the map that snip_te_map was written from")
            for name in names:
                for linear in _modules(layer, name.removeprefix(prefix)):
                    if not hasattr(linear, "get_quantizer_roles"):
                        kind = type(linear).__name__
                        raise ValueError(f"{name} is {kind}, no linear of Transformer Engine 2.19 or later")
                    linear.name = name
                    named.add(linear)
    for path, module in model.named_modules():
        if hasattr(module, "get_quantizer_roles"):
            module.get_extra_state = _no_state
            if module not in named:  # it stays in bf16, as the output layer does
                module.name = f"bf16.{path}"
    return len(named)


def _no_state() -> Any:
    """Return what a module without a recipe saves. Megatron's experts refuse to read this recipe."""
    return torch.empty(0, dtype=torch.uint8)


def _modules(layer: Any, path: str) -> list[Any]:
    """Return the modules of one name: one of each local expert where experts are apart."""
    owner, _, last = path.rpartition(".")
    experts = getattr(layer.get_submodule(owner), "local_experts", None)
    return [layer.get_submodule(path)] if experts is None else [getattr(expert, last) for expert in experts]


def quantizer_of_format(name: str, tensor: str) -> Any:
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
            te.DType.kFloat8E4M3,
            rowwise=True,
            columnwise=True,
            force_pow_2_scales=blackwell,
            block_scaling_dim=2 if weight else 1,
        )
    if name == "nvfp4":  # without a Hadamard transform, whose signs are not the map's
        return te.NVFP4Quantizer(
            te.DType.kFloat4E2M1,
            with_rht=False,
            with_post_rht_amax=False,
            with_2d_quantization=weight,
            stochastic_rounding=tensor == "grad_output",
        )
    raise ValueError(f"snip_te_map has no quantizer for {name}")

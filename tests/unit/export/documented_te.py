"""The interface of Transformer Engine 2.19 and 2.20 that a quantizer factory meets: signatures, refusals, and a linear.

Quantizers only remember what they are. The linear asks a recipe for its quantizers as Transformer Engine's does, and
says in what its three GEMMs would be multiplied. test_te_factory.py compares this with an installed Transformer Engine.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch


class DType(enum.IntEnum):
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


@dataclass(frozen=True)
class QuantizerRole:
    module_type: str = ""
    tensor_type: str = ""
    name: str = ""


@dataclass
class CustomRecipe:
    qfactory: Callable[..., Any]


class Quantizer:
    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def usage(self, usage: str) -> Quantizer:
        """The quantizer of one representation, as general_gemm takes it from an operand."""
        assert self.rowwise_usage if usage == "rowwise" else self.columnwise_usage
        return self


class IdentityQuantizer(Quantizer):
    def __init__(self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = dtype


class MXFP8Quantizer(Quantizer):
    def __init__(
        self, fp8_dtype: DType, *, rowwise: bool = True, columnwise: bool = True, with_2d_quantization: bool = False
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype, self.with_2d_quantization = DType(fp8_dtype), with_2d_quantization


class NVFP4Quantizer(Quantizer):
    def __init__(
        self,
        fp4_dtype: DType = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype, self.with_rht, self.with_post_rht_amax = DType(fp4_dtype), with_rht, with_post_rht_amax
        self.with_2d_quantization, self.stochastic_rounding = with_2d_quantization, stochastic_rounding


class Float8CurrentScalingQuantizer(Quantizer):
    def __init__(
        self, fp8_dtype: DType, device: torch.device, *, rowwise: bool = True, columnwise: bool = True,
        force_pow_2_scales: bool = False, amax_epsilon: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype, self.device, self.force_pow_2_scales = DType(fp8_dtype), torch.device(device), force_pow_2_scales


class Float8BlockQuantizer(Quantizer):
    def __init__(
        self, fp8_dtype: DType, *, rowwise: bool, columnwise: bool, amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True, block_scaling_dim: int = 2,
    ) -> None:  # fmt: skip
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype, self.force_pow_2_scales, self.block_scaling_dim = (
            DType(fp8_dtype), force_pow_2_scales, block_scaling_dim,
        )  # fmt: skip


class HybridQuantizer(Quantizer):
    def __init__(
        self, *, rowwise_quantizer: Quantizer, columnwise_quantizer: Quantizer, columnwise_source: str = "original"
    ) -> None:
        super().__init__(rowwise=True, columnwise=True)
        if not isinstance(rowwise_quantizer, Quantizer) or not isinstance(columnwise_quantizer, Quantizer):
            raise TypeError("HybridQuantizer requires concrete Quantizer instances")
        if rowwise_quantizer is columnwise_quantizer:
            raise ValueError("HybridQuantizer requires distinct quantizer instances")
        if columnwise_source not in ("original", "rowwise_dequantized"):
            raise ValueError(f"columnwise_source {columnwise_source!r}")
        self.rowwise_quantizer, self.columnwise_quantizer = rowwise_quantizer, columnwise_quantizer
        self.columnwise_source = columnwise_source
        rowwise_quantizer.set_usage(rowwise=True, columnwise=False)
        columnwise_quantizer.set_usage(rowwise=False, columnwise=True)

    def usage(self, usage: str) -> Quantizer:
        child = self.rowwise_quantizer if usage == "rowwise" else self.columnwise_quantizer
        return child.usage(usage)


class Linear(torch.nn.Module):
    """A linear that asks for its quantizers at its first forward. Megatron gives it no name, and so it makes one up."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        Linear.made += 1
        self.name = f"Layer_{Linear.made}"

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[QuantizerRole | None]:
        tensors = ("input", "weight") if fwd else ("grad_output",)
        roles = [QuantizerRole("linear", tensor, self.name) for tensor in tensors]
        assert len(roles) + 1 == num_quantizers
        return [*roles, None]  # the consumer of the output and of the input's gradient is unknown

    def gemms(self, recipe: CustomRecipe) -> dict[str, tuple[Quantizer, Quantizer]]:
        """The quantizers of both operands of every GEMM."""
        forward = self.get_quantizer_roles(fwd=True, num_quantizers=3)
        backward = self.get_quantizer_roles(fwd=False, num_quantizers=2)
        made = [recipe.qfactory(role) for role in (*forward, *backward)]
        assert all(isinstance(quantizer, Quantizer) for quantizer in made)
        assert len({id(quantizer) for quantizer in made}) == len(made)
        x, w, _, g, _ = made
        return {
            "fprop": (w.usage("rowwise"), x.usage("rowwise")),
            "dgrad": (w.usage("columnwise"), g.usage("rowwise")),
            "wgrad": (x.usage("columnwise"), g.usage("columnwise")),
        }


def modules() -> dict[str, ModuleType]:
    """The package as ``sys.modules`` holds it."""
    package, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    for name in (
        "DType", "QuantizerRole", "Quantizer", "IdentityQuantizer", "MXFP8Quantizer", "NVFP4Quantizer",
        "Float8CurrentScalingQuantizer", "Float8BlockQuantizer", "HybridQuantizer", "Linear",
    ):  # fmt: skip
        setattr(pytorch, name, globals()[name])
    setattr(package, "pytorch", pytorch)  # noqa: B010
    return {"transformer_engine": package, "transformer_engine.pytorch": pytorch}

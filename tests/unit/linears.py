"""Real Megatron linears on one gloo rank, and what their quantised GEMMs must give, composed independently."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from handles import handle_of
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from snip_megatron.layers.context import LinearHandle, LinearState, StepContext
from snip_megatron.megatron.linears import SnipColumnParallelLinear, SnipRowParallelLinear
from snip_megatron.numerics.quantize import derive_seed, fake_quantize
from snip_megatron.numerics.quantize.formats import SPECS, STOCHASTIC
from snip_megatron.numerics.quantize.reference import ROTATED, rotate
from snip_megatron.precision import Format, Formats, LinearId

FC1 = LinearId("decoder", 2, "mlp.linear_fc1")
FC1_INDEX = 2 * 4 + 2  # layer 2, the third of a layer's four linears


def stock_linear(n: int, k: int, *, row: bool = False, bias: bool = False, dtype: torch.dtype) -> Any:
    """Megatron's own linear with weights from a fixed seed, weight [n, k]."""
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True, params_dtype=dtype
    )
    shared: dict[str, Any] = {
        "config": config,
        "init_method": lambda w: torch.nn.init.normal_(w, std=k**-0.5),
        "bias": bias,
        "tp_group": dist.group.WORLD,
    }
    if row:
        linear = RowParallelLinear(k, n, input_is_parallel=True, skip_bias_add=False, **shared)
    else:
        linear = ColumnParallelLinear(k, n, gather_output=False, **shared)
    if bias:
        torch.nn.init.normal_(linear.bias)
    return linear


def convert(linear: Any, context: StepContext, formats: Formats) -> LinearHandle:
    """Make a stock linear ours, as conversion does, under ``formats``."""
    row = isinstance(linear, RowParallelLinear)
    n, k = linear.weight.shape
    state = LinearState(position=FC1_INDEX, formats=formats)
    handle = handle_of(FC1, n, k, context, parallel="row" if row else "column", module=linear, state=state)
    linear.__class__ = SnipRowParallelLinear if row else SnipColumnParallelLinear
    linear.snip = handle
    return handle


def our_linear(context: StepContext, formats: Formats, n: int, k: int, **options: Any) -> Any:
    """Return a converted linear. Its ``snip`` is its handle."""
    linear = stock_linear(n, k, **options)
    convert(linear, context, formats)
    return linear


def operands(s: int, b: int, n: int, k: int, dtype: torch.dtype, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """X [s, b, k] that requires gradients and G [s, b, n]; with columns and rows of very different size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(s, b, k, generator=generator) * torch.rand(k, generator=generator).exp()
    g = torch.randn(s, b, n, generator=generator) * torch.rand(s, b, 1, generator=generator).mul(3).exp() * 1e-4
    return x.to(dtype).requires_grad_(), g.to(dtype)


def passed(linear: Any, s: int, b: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """X, G and Y of a forward and a backward."""
    x, g = operands(s, b, *linear.weight.shape, linear.weight.dtype, seed)
    y = linear(x)[0]
    y.backward(g)
    return x, g, y


def reference(
    x: torch.Tensor,
    w: torch.Tensor,
    g: torch.Tensor,
    formats: Formats,
    context: StepContext,
    microbatch: int = 0,
    seed_of: Callable[[int], int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Y [s, b, n], ∂L/∂X [s, b, k], ∇W [n, k] in float64 from operands quantised as docs/how-it-works.md says.

    ``seed_of`` has the seed of a GEMM's stochastic rounding of G, if this is not FC1.
    """
    rows = x.shape[:-1]
    x, w, g = (t.detach().reshape(-1, t.shape[-1]) for t in (x, w, g))
    fprop, dgrad, wgrad = formats

    def quantised(t: torch.Tensor, fmt: Format, **options: Any) -> torch.Tensor:
        return t.double() if fmt is Format.BF16 else fake_quantize(t, fmt, **options).double()

    def rounding(fmt: Format, gemm: int) -> dict[str, Any]:
        seeds = seed_of or partial(derive_seed, context.seed, context.step, microbatch, FC1_INDEX)
        return {"rounding": "stochastic", "seed": seeds(gemm)} if fmt in STOCHASTIC else {}

    drawn = derive_seed(context.seed, context.step, 0x486164616D617264, FC1_INDEX) >> 48
    y = quantised(x, fprop) @ quantised(w, fprop, block=True).t()
    d = quantised(g, dgrad, **rounding(dgrad, 1)) @ quantised(w, dgrad, block=True, axis=0)
    if wgrad in ROTATED:
        x, g = (rotate(t, drawn if SPECS[wgrad].random_signs else 0) for t in (x, g))
    gw = quantised(g, wgrad, axis=0, **rounding(wgrad, 2)).t() @ quantised(x, wgrad, axis=0)
    return y.view(*rows, len(w)), d.view(*rows, w.shape[1]), gw

"""Runs every kind of GEMM on tensors of its own, so that its kernels can be listed."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from snip_megatron.layers.autograd import LinearCall, QuantizedLinear, gradient_keys
from snip_megatron.layers.context import LinearHandle, LinearState
from snip_megatron.layers.grouped import grouped_product, grouped_products
from snip_megatron.layers.registry import DeviceStep
from snip_megatron.layers.swiglu import quantized_gradient, quantized_swiglu
from snip_megatron.numerics.products.grouped import DeviceRows, group_rows
from snip_megatron.numerics.quantize.operands import OperandSpec
from snip_megatron.precision import ALL_BF16, Format, Formats


@dataclass(frozen=True)
class WarmUpLinear:
    """A linear with the shapes of one of the model's, which runs on this rank alone."""

    handle: LinearHandle  # with a weight and a gradient of its own, both zero
    # X [tokens, K local] and G [tokens, N local], zero
    x: torch.Tensor
    g: torch.Tensor
    whole_x: bool  # whether shards of X are gathered, as under sequence parallelism
    experts: int = 0  # number of experts that have such a linear, for grouped products; 0 for a linear that runs alone

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Run the linear. Experts share one weight, and the rows evenly."""
        handle = self.handle
        if not self.experts:
            call = LinearCall(handle, has_backward=torch.is_grad_enabled())
            return QuantizedLinear.apply(x, handle.weight, None, call)  # type: ignore[no-untyped-call,no-any-return]
        rows, remainder = divmod(len(x), self.experts)
        splits = [rows + (expert < remainder) for expert in range(self.experts)]
        return grouped_product([handle] * self.experts, [handle.weight] * self.experts, x, splits)


def warm_up_linear(handle: LinearHandle, tokens: int, *, whole_x: bool, graphed: bool = False) -> WarmUpLinear:
    """Return a linear like that of ``handle``.

    X and G have ``tokens`` rows. A ``graphed`` linear reads keys and weights from the device, as in CUDA graphs.
    """
    like = handle.weight
    weight = torch.nn.Parameter(torch.zeros(like.shape, dtype=like.dtype, device=like.device))  # all of a sharded one
    dtype = torch.float32 if (main_grad := getattr(like, "main_grad", None)) is None else main_grad.dtype
    weight.main_grad = torch.zeros(like.shape, dtype=dtype, device=like.device)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    state = LinearState(beside_swiglu=handle.state.beside_swiglu)
    module = torch.nn.Module()
    module.register_parameter("weight", weight)
    copy = replace(handle, module=module, parameter="weight", tp_group=None, state=state)
    experts = len(getattr(handle.module, "snip_experts", ()))
    if graphed:
        DeviceStep([copy], [0], weight.device)
    n, k = like.shape
    x, g = (weight.detach().new_zeros(tokens, features) for features in (k, n))
    return WarmUpLinear(copy, x, g, whole_x, experts)


def warm_up_gemms(linear: WarmUpLinear, formats: Iterable[Formats]) -> None:
    """Run forward and backward in each of ``formats``, and a forward alone, as validation and recomputation do."""
    handle, backend = linear.handle, linear.handle.context.backend
    for chosen in formats:
        if chosen == ALL_BF16:
            continue  # runs Megatron's own linear
        handle.state.formats = chosen
        handle.state.weights.clear()
        x = linear.x.detach().requires_grad_()
        torch.autograd.backward(linear.product(x), linear.g)
        with torch.no_grad():
            linear.product(linear.x)
        if linear.whole_x:
            rotation = handle.rotation("x", linear.x, chosen[2], on_device=True)
            backend.quantize(linear.x, OperandSpec(None, chosen[2], rotation=rotation))
        if handle.state.beside_swiglu:
            _warm_up_swiglu(linear, LinearCall(handle))
    handle.state.formats = ALL_BF16


def _warm_up_swiglu(linear: WarmUpLinear, call: LinearCall) -> None:
    """Quantise SwiGLU as the second linear of an MLP takes it, or its gradient as the first one does."""
    handle = linear.handle
    fprop, dgrad, wgrad = handle.formats
    if linear.experts:
        _warm_up_weighted_swiglu(linear, call)
    elif handle.parallel == "column":
        if handle.context.backend.swiglu_kernel(linear.g, (dgrad, wgrad)):
            quantized_gradient(linear.g.new_zeros(len(linear.g), linear.g.shape[1] // 2), linear.g, call)
    else:
        y = linear.x.new_zeros(len(linear.x), 2 * linear.x.shape[1])
        for saved in (wgrad, None):  # in training; in validation and recomputation
            quantized_swiglu(y, handle, (fprop, saved))


def _warm_up_weighted_swiglu(linear: WarmUpLinear, call: LinearCall) -> None:
    """Do the same between two linears of experts, with all rows for one of them, and at their padding's two ends."""
    handle, products, (fprop, dgrad, wgrad) = linear.handle, grouped_products(linear.handle), linear.handle.formats
    if not products.pads:
        return
    rows = group_rows((len(linear.x), *[0] * (linear.experts - 1)), linear.x.device, backwards=True)  # which moves rows
    if products.takes_device_rows(handle.formats):
        DeviceRows(linear.x.new_zeros(linear.experts, dtype=torch.long), len(linear.x), backwards=True)
    probs = linear.x.new_zeros(len(linear.x), dtype=torch.float32)
    probs, x, g = (rows.pad(each) for each in (probs, linear.x, linear.g))
    for each in (probs, x, g):
        rows.unpad(each)
    spec = OperandSpec(dgrad, wgrad, keys=gradient_keys(call, linear.g, dgrad, wgrad))
    if handle.parallel == "row":
        products.quantize_unpadded(linear.g, rows, spec)
        for saved in (wgrad, None):
            if products.fuses_swiglu((fprop, saved)):
                products.swiglu(torch.cat([x, x], 1), probs, rows, OperandSpec(fprop, saved))
    else:
        products.quantize_unpadded(linear.x, rows, OperandSpec(fprop, wgrad))
        if products.fuses_swiglu((dgrad, wgrad)):
            products.swiglu_gradient(g[:, : g.shape[1] // 2].contiguous(), g, probs, rows, spec)


def covering(options: tuple[Sequence[Format], Sequence[Format], Sequence[Format]], *, alike: bool) -> list[Formats]:
    """Return few choices of three formats that contain every pair of formats of every two GEMMs.

    Each of X, W and G is quantised for two GEMMs at once, and kernels are compiled for each pair of formats.
    ``options`` are possible formats of fprop, dgrad and wgrad, which are ``alike`` if the three GEMMs of a linear
    always have the same.
    """
    if alike:
        return [(fmt, fmt, fmt) for fmt in options[0] if fmt in options[1] and fmt in options[2]]
    fprops, dgrads, wgrads = options
    length = max(map(len, options))
    choices = [
        (fprops[i % len(fprops)], dgrads[j % len(dgrads)], wgrads[(i + j) % len(wgrads)])
        for i, j in itertools.product(range(length), repeat=2)
    ]
    return list(dict.fromkeys(choices))

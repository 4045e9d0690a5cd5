"""Planted faults of rounding, which harm the reference as well as kernels, and steps that fail in bf16 too."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.quality.blame_sites import GEMMS, OPERANDS, ROWWISE, Loaded, Plant, Site, norm_of, on_load


def of_spec(change: Callable[[Site, str, Any], Any]) -> Plant:
    """Return what changes how operands of a site are quantised, by all backends."""

    def plant(site: Site) -> None:
        from snip_megatron.layers.context import LinearHandle

        spec_of = LinearHandle.spec

        def spec(handle: Any, name: str, *arguments: Any, **options: Any) -> Any:
            result = spec_of(handle, name, *arguments, **options)
            if handle.name != site.linear or not site.is_here:
                return result
            return change(site, name, result)

        LinearHandle.spec = spec  # type: ignore[method-assign]

    return plant


def e5m2(site: Site, name: str, spec: Any) -> Any:
    """X and G of a GEMM are cast to E5M2 without a scale: two bits of mantissa are left, and small numbers vanish.

    W stays, whose two operands may be one.
    """
    from snip_megatron.numerics.quantize.operands import OperandSpec

    class Coarse(OperandSpec):
        def quantizer_arguments(self, x: torch.Tensor, axis: int) -> Any:
            if name != "w" and any(
                site.hits(gemm) and name in OPERANDS[gemm] and ROWWISE.get((gemm, name), False) == (axis == 1)
                for gemm in GEMMS
            ):
                x = x.to(torch.float8_e5m2).to(x.dtype)
            return super().quantizer_arguments(x, axis)

    return Coarse(*spec)


def flushed(site: Site, name: str, spec: Any) -> Any:
    """Gradients below a hundredth of the largest one vanish."""
    from snip_megatron.numerics.quantize.operands import OperandSpec

    class Flushed(OperandSpec):
        def quantizer_arguments(self, x: torch.Tensor, axis: int) -> Any:
            if any(site.hits(gemm) and ROWWISE.get((gemm, "g"), False) == (axis == 1) for gemm in ("dgrad", "wgrad")):
                x = torch.where(x.abs() < x.abs().max() / 100, torch.zeros_like(x), x)
            return super().quantizer_arguments(x, axis)

    return Flushed(*spec) if name == "g" else spec


def to_nearest(site: Site, name: str, spec: Any) -> Any:
    """Gradients in a four-bit format lose their stochastic rounding."""
    return spec._replace(keys=None) if name == "g" else spec


def stale_amax(operand: str, factor: float) -> Plant:
    """The scale of a whole tensor is that of a step in which it was ``factor`` times as large."""

    def change(site: Site, name: str, spec: Any) -> Any:
        if name != operand or spec.amax is None:
            return spec
        return spec._replace(amax=spec.amax * factor)

    def plant(site: Site) -> None:
        from snip_megatron.layers.context import WHOLE_TENSOR, LinearHandle, amax_of

        shared = LinearHandle.shared_amax

        def shared_amax(handle: Any, name: str, x: torch.Tensor, formats: Any) -> Any:
            amax, formats = shared(handle, name, x, tuple(formats)), tuple(formats)
            if amax is None and handle.name == site.linear and not WHOLE_TENSOR.isdisjoint(formats):
                amax = amax_of(x)
            return amax

        LinearHandle.shared_amax = shared_amax  # type: ignore[method-assign]
        of_spec(change)(site)

    return plant


def _norm_and_weight(loaded: Loaded, linear: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight of the norm before a linear and that of the linear, of Megatron's or Transformer Engine's."""
    parameters = loaded.parameters
    norm = parameters.get(f"{linear}.layer_norm_weight")
    return (parameters[norm_of(linear)] if norm is None else norm).data, parameters[f"{linear}.weight"].data


def outlier_channel(exponent: int) -> Plant:
    """A channel of X is 2^exponent times as large, and its weights as much smaller: in bf16 the same function."""

    def plant(site: Site) -> None:
        def change(loaded: Loaded) -> None:
            norm, weight = _norm_and_weight(loaded, site.linear)
            channels = random.Random(site.seed).sample(range(len(norm)), max(2, len(norm) // 128))
            norm[channels] *= 2.0**exponent
            weight[:, channels] *= 2.0**-exponent

        on_load(change)

    return plant


def huge_tiles(exponent: int) -> Plant:
    """One weight in each block is huge, in a channel that the norm has switched off."""

    def plant(site: Site) -> None:
        def change(loaded: Loaded) -> None:
            norm, weight = _norm_and_weight(loaded, site.linear)
            generator = random.Random(site.seed)
            for first in range(0, len(norm), 128):
                channel = min(first + generator.randrange(128), len(norm) - 1)
                norm[channel] = 0
                weight[::128, channel] = 2.0**exponent

        on_load(change)

    return plant


# -- steps that fail in bf16 too ---------------------------------------------------------------------------------------
def large_weights(site: Site) -> None:
    """The weights have grown under a learning rate that is too high: the loss is high in bf16 too."""

    def change(loaded: Loaded) -> None:
        for name, parameter in loaded.parameters.items():
            if "linear" in name and parameter.dim() == 2:
                parameter.data.mul_(2.0)

    on_load(change)


def broken_norm(site: Site) -> None:
    """A weight is NaN, so that bf16 is too."""

    def change(loaded: Loaded) -> None:
        loaded.parameters["decoder.final_layernorm.weight"].data[7] = torch.nan

    on_load(change)


def broken_attention(site: Site) -> None:
    """Attention leaves out the last head, in any format."""

    def cut(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[..., -(output.shape[-1] // 8) :] = 0
        return output

    def change(loaded: Loaded) -> None:
        loaded.modules["decoder.layers.1.self_attention.core_attention"].register_forward_hook(cut)

    on_load(change, main=False)


def noise_for_text(site: Site) -> None:
    """A shard of the text is damaged: its tokens are random."""
    from snip_megatron.megatron import entry

    get = entry.get_batch

    def get_batch(args: Any, data_iterator: Any, **options: Any) -> Any:
        batch = get(args, data_iterator, **options)
        for name in ("tokens", "labels"):
            if batch.get(name) is not None:
                generator = torch.Generator().manual_seed(site.seed)
                drawn = torch.randint(0, 255, batch[name].shape, generator=generator)
                batch[name] = drawn.to(batch[name].device)
        return batch

    entry.get_batch = get_batch

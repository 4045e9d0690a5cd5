"""Runs the Triton quantisers: on the GPU if there is one, otherwise in Triton's interpreter in a process of its own."""

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from snip_megatron.numerics.quantize.operands import CachedPair
from snip_megatron.numerics.quantize.reference import Rotation


def matrix(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows and columns of very different size, signed zeros, subnormals, a zero tile."""
    generator = torch.Generator().manual_seed(rows + cols)
    spread = torch.randn(rows, 1, generator=generator).mul(8).exp() * torch.randn(cols, generator=generator).exp()
    x = torch.randn(rows, cols, generator=generator) * spread
    x[0] = 0.0
    x[-1, -1] = -0.0
    x[rows // 2] *= 1e-36 if dtype is not torch.float16 else 1e-7
    return x.clamp(-6e4, 6e4).to(dtype)


class Quantizers:
    """``call("quantize_operands", x, spec("fp8"))`` and so on; tensors go in and come back on the CPU."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self.on_gpu = torch.cuda.is_available()
        self._pool = pool

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        if self.on_gpu:
            return _to(_run(name, _to(arguments, "cuda"), _to(options, "cuda")), "cpu")
        packed = self._pool.submit(_run_packed, name, _pack(arguments), _pack(options)).result(timeout=300)
        return _unpack(packed)


def _run(name: str, arguments: Any, options: Any) -> Any:
    from snip_megatron.numerics.products import grouped_wgrad, tiled_kernel
    from snip_megatron.numerics.quantize.kernels import exact, partial_sums, swiglu
    from snip_megatron.numerics.quantize.kernels import quantize as triton_quantize

    writing = {
        "add_wgrad": grouped_wgrad.add_wgrad,
        "advance": triton_quantize.advance,
        "tiled_product": tiled_kernel.multiply,
    }
    if name in writing:
        writing[name](*arguments, **options)
        return arguments if name == "advance" else arguments[-1]
    module = next(module for module in (exact, swiglu, partial_sums, triton_quantize) if hasattr(module, name))
    return getattr(module, name)(*arguments, **options)


def _run_packed(name: str, arguments: Any, options: Any) -> Any:
    return _pack(_run(name, _unpack(arguments), _unpack(options)))


def _to(value: Any, device: str) -> Any:
    return _map(value, lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf)


def _pack(value: Any) -> Any:
    """Tensors as (bytes, dtype, size, stride): shared memory between processes is scarce in containers."""

    def pack(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        size, stride = tuple(leaf.shape), leaf.stride()
        count = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if leaf.numel() else 0
        flat = leaf.as_strided((count,), (1,)).view(torch.uint8)
        return _Packed(flat.numpy().tobytes(), leaf.dtype, size, stride)

    return _map(value, pack)


def _unpack(value: Any) -> Any:
    def unpack(leaf: Any) -> Any:
        if not isinstance(leaf, _Packed):
            return leaf
        flat = torch.frombuffer(bytearray(leaf.data), dtype=torch.uint8) if leaf.data else torch.empty(0)
        return flat.view(leaf.dtype).as_strided(leaf.size, leaf.stride)

    return _map(value, unpack)


class _Packed:
    def __init__(self, data: bytes, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self.data, self.dtype, self.size, self.stride = data, dtype, size, stride


def _map(value: Any, function: Any) -> Any:
    if isinstance(value, CachedPair):
        return CachedPair(_map(value.operands, function), function(value.current))
    if isinstance(value, Rotation):
        return Rotation(function(value.signs), function(value.amax))
    if isinstance(value, tuple):
        return tuple.__new__(type(value), [_map(part, function) for part in value])
    if isinstance(value, dict):
        return {key: _map(part, function) for key, part in value.items()}
    return function(value)

"""Hooks on the blocks of a model that record the residual stream at its boundaries and add the noise of probes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from snip_megatron.errors import SnipError
from snip_megatron.plain.structure import Structure
from snip_megatron.quantization import derive_seed, random_normal
from snip_megatron.statistics.boundaries import Boundary, TokenShard
from snip_megatron.statistics.recorder import Pass


class PlainStream:
    """The boundaries of a model: before attention and MLP of each block, and after the last block.

    Args:
        structure: The model's blocks.
        sample_tokens: Number of tokens of which the stream is recorded.
        seed: Seed of the noise, which differs from step to step.
    """

    def __init__(self, structure: Structure, sample_tokens: int, seed: int) -> None:
        shard = TokenShard(rank=0, size=1, reports=True)
        self._structure = structure
        self._seed = seed
        self._noise: dict[Pass, float] = {}
        self.boundaries = [Boundary(i, shard, sample_tokens) for i in range(2 * len(structure.blocks) + 1)]

    def start(self, phase: Pass, sigma: float = 0.0) -> None:
        """Begin a pass. ``sigma`` is the standard deviation of its noise."""
        self._noise = {phase: sigma}
        for boundary in self.boundaries:
            boundary.start(phase)

    def finish_statistics(self) -> None:
        """Compute the norms of the residual branches after the statistics pass.

        Raises:
            SnipError: If a boundary was not passed exactly once, forward and backward.
        """
        for boundary in self.boundaries:
            if (len(boundary.h), len(boundary.r)) != (1, 1):
                block = min(boundary.index // 2, len(self._structure.blocks) - 1)
                raise SnipError(
                    f"block {block} ran {len(boundary.h)} times forward and {len(boundary.r)} times backward in one"
                    " loss: SNIP takes blocks that run once, on the residual stream as their first argument, without"
                    " activation checkpointing or torch.compile"
                )
        for low, high in zip(self.boundaries, [*self.boundaries[1:], None], strict=True):
            low.finish_statistics(high)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Install the hooks inside this context."""
        with ExitStack() as stack:
            for i, block in enumerate(self._structure.blocks):
                hook = self._on_block(self.boundaries[2 * i], noisy=i == 0)
                stack.callback(block.module.register_forward_pre_hook(hook, with_kwargs=True).remove)
                hook = self._on_norm(self.boundaries[2 * i + 1])
                stack.callback(block.norms[1].register_forward_pre_hook(hook).remove)
            last = self._structure.blocks[-1].module
            stack.callback(last.register_forward_hook(self._on_output).remove)
            yield

    def _on_block(self, boundary: Boundary, *, noisy: bool) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name = None if args else next(iter(kwargs), None)
            stream = args[0] if args else kwargs.get(name or "")
            if not isinstance(stream, torch.Tensor) or stream.shape[-1] != self._structure.hidden:
                raise SnipError("the first argument of a block must be the residual stream")
            sigma = self._noise.get(Pass.FORWARD_NOISE, 0.0)
            if noisy and sigma:
                stream = stream + self._draw(sigma, stream)
            if noisy and torch.is_grad_enabled() and not stream.requires_grad:  # all embeddings are frozen
                stream = stream.detach().requires_grad_()
            boundary.on_forward(stream)
            return ((stream, *args[1:]), kwargs) if args else ((), {**kwargs, str(name): stream})

        return hook

    def _on_norm(self, boundary: Boundary) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            boundary.on_forward(args[0])

        return hook

    def _on_output(self, module: nn.Module, args: Any, output: Any) -> None:
        stream = output[0] if isinstance(output, tuple) else output
        sigma = self._noise.get(Pass.BACKWARD_NOISE, 0.0)
        if sigma:
            stream.register_hook(lambda gradient: gradient + self._draw(sigma, gradient))
        self.boundaries[-1].on_forward(stream)

    def _draw(self, sigma: float, like: torch.Tensor) -> torch.Tensor:
        rows, hidden = like.numel() // like.shape[-1], like.shape[-1]
        direction = 0 if Pass.FORWARD_NOISE in self._noise else 1
        tokens, features = torch.arange(rows, device=like.device), torch.arange(hidden, device=like.device)
        noise = random_normal(derive_seed(self._seed, direction), tokens, features)
        return (noise * sigma).view(like.shape).to(like.dtype)

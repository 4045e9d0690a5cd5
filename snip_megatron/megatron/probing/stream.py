"""Hooks on Megatron's residual stream that record statistics at its boundaries and add the noise of probes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_attr_wrapped_model

from snip_megatron.layers.context import StepContext
from snip_megatron.quantization import derive_seed, random_normal
from snip_megatron.statistics.boundaries import Boundary, TokenShard
from snip_megatron.statistics.recorder import Pass

_FORWARD, _BACKWARD = 0, 1


class ResidualStream:
    """The boundaries of this rank's model chunks: the residual stream before each sub-block, and after the last layer.

    Args:
        chunks: Model chunks of this rank.
        context: State that the converted linears share.
        shard: The tokens of this rank.
        sample_tokens: Value of ``--snip-probe-tokens``.
        seed: Seed of the noise.

    Attributes:
        reported: Boundaries whose sums go to the table. Each boundary is reported by one pipeline stage.
        noise: Standard deviation of the noise per direction in the current pass.
    """

    def __init__(
        self, chunks: Sequence[torch.nn.Module], context: StepContext, shard: TokenShard, sample_tokens: int, seed: int
    ) -> None:
        self._context = context
        self._shard = shard
        self._seed = seed
        self.reported: list[Boundary] = []
        self._pairs: list[tuple[Boundary, Boundary]] = []
        self._hooks: list[tuple[TransformerLayer, Boundary, Boundary, Boundary | None]] = []
        self._embeddings: list[torch.nn.Module] = []
        self.noise: dict[int, float] = {_FORWARD: 0.0, _BACKWARD: 0.0}
        self._noise_count = {_FORWARD: 0, _BACKWARD: 0}
        self._phase = Pass.STATISTICS
        self._top: Boundary | None = None
        for chunk in chunks:
            self._add_chunk(chunk, shard, sample_tokens)

    def _add_chunk(self, chunk: torch.nn.Module, shard: TokenShard, sample_tokens: int) -> None:
        model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
        if getattr(model, "pre_process", False):
            self._embeddings.append(model.embedding)
        layers = list(model.decoder.layers)
        boundaries: list[Boundary] = []
        for layer in layers:
            first = 2 * (layer.layer_number - 1)
            boundaries += [Boundary(first, shard, sample_tokens), Boundary(first + 1, shard, sample_tokens)]
        if not layers:
            return
        tail = Boundary(2 * layers[-1].layer_number, shard, sample_tokens)
        self.reported += boundaries
        if layers[-1].layer_number == layers[-1].config.num_layers:
            self.reported.append(tail)
            self._top = tail
        self._pairs += list(zip(boundaries, [*boundaries[1:], tail], strict=True))
        for i, layer in enumerate(layers):
            last = tail if i == len(layers) - 1 else None
            self._hooks.append((layer, boundaries[2 * i], boundaries[2 * i + 1], last))

    @property
    def all(self) -> list[Boundary]:
        """All boundaries of this rank, including the outputs of its chunks that another stage reports."""
        return list({id(b): b for pair in self._pairs for b in pair}.values())

    def start(self, phase: Pass, sigma: float = 0.0) -> None:
        """Begin a pass. ``sigma`` is the standard deviation of its noise."""
        self._phase = phase
        self.noise = {
            _FORWARD: sigma if phase is Pass.FORWARD_NOISE else 0.0,
            _BACKWARD: sigma if phase is Pass.BACKWARD_NOISE else 0.0,
        }
        self._noise_count = {_FORWARD: 0, _BACKWARD: 0}
        for boundary in self.all:
            boundary.start(phase)

    def finish_statistics(self) -> None:
        """Compute the norms of the residual branches after the statistics pass."""
        for low, high in self._pairs:
            low.finish_statistics(high)
        if self._top is not None:
            self._top.finish_statistics(None)

    # -- hooks -------------------------------------------------------------------------------------------------
    @contextmanager
    def attached(self) -> Iterator[None]:
        """Install the hooks inside this context."""
        handles = []
        try:
            for layer, below_attention, below_mlp, tail in self._hooks:
                handles.append(layer.register_forward_pre_hook(_on_layer_input(below_attention), with_kwargs=True))
                handles.append(layer.pre_mlp_layernorm.register_forward_pre_hook(_on_norm_input(layer, below_mlp)))
                if tail is not None:
                    handles.append(layer.register_forward_hook(self._on_layer_output(tail)))
            handles += [embedding.register_forward_hook(self._on_embedding) for embedding in self._embeddings]
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _on_embedding(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + self._draw(_FORWARD, output) if self.noise[_FORWARD] else output

    def _on_layer_output(self, tail: Boundary) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            stream = output[0] if isinstance(output, tuple) else output
            if torch.is_grad_enabled():
                if tail is self._top and self.noise[_BACKWARD]:
                    stream.register_hook(lambda gradient: gradient + self._draw(_BACKWARD, gradient))
                tail.on_forward(stream)

        return hook

    def _draw(self, direction: int, like: torch.Tensor) -> torch.Tensor:
        """Draw Gaussian noise [s(/tp), b, hidden] that depends on the global microbatch, token and feature only."""
        context = self._context
        microbatch = self._noise_count[direction] * context.dp_size + context.dp_rank
        self._noise_count[direction] += 1
        seed = derive_seed(self._seed, context.step, microbatch, direction)
        rows, hidden = like.numel() // like.shape[-1], like.shape[-1]
        first = self._shard.first_row(rows)
        tokens = torch.arange(first, first + rows, device=like.device)
        noise = random_normal(seed, tokens, torch.arange(hidden, device=like.device))
        return (noise * self.noise[direction]).view(like.shape).to(like.dtype)


def _on_layer_input(boundary: Boundary) -> Callable[..., None]:
    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Under full recomputation the first forward runs without gradients, and only the second is recorded.
        if torch.is_grad_enabled():
            boundary.on_forward(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    return hook


def _on_norm_input(layer: TransformerLayer, boundary: Boundary) -> Callable[..., None]:
    def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        # If this norm alone is recomputed, its first forward runs without gradients on a tensor of the outer graph and
        # is recorded. The second one runs on a detached copy, which would miss the gradient of the residual branch.
        if torch.is_grad_enabled() != bool(getattr(layer, "recompute_pre_mlp_layernorm", False)):
            boundary.on_forward(args[0])

    return hook

"""Hooks on the residual stream. They record statistics at its boundaries and add the noise of probes."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from snip_megatron.layers.context import StepContext
from snip_megatron.numerics.quantize import derive_seed, random_normal
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.host import Host, StreamReader, StreamSegment
from snip_megatron.sensitivity.recorder import Attempt, Boundary, Pass, directly

_EMBEDDING = (0, 0)  # of the seeds of the noise


@dataclass(eq=False)
class ResidualStream:
    """The boundaries of this rank's model chunks: residual streams before each sub-block, and after the last one.

    Each boundary is reported by one pipeline stage.

    Attributes:
        boundaries: All boundaries of this rank, also the outputs of its chunks that another stage reports.
        reported: The boundaries whose sums this rank adds to the table.
    """

    host: Host
    context: StepContext  # the state that the converted linears share
    sample_tokens: int  # the setting ``probe_tokens``
    seed: int  # seed of the noise
    attempt: Attempt = directly  # calls what no other rank waits for

    def __post_init__(self) -> None:
        self.reported: list[Boundary] = []
        self.boundaries: list[Boundary] = []
        self._segments: list[tuple[StreamSegment, list[Boundary]]] = []
        self._sigma, self._draws = 0.0, 0
        for segment in self.host.segments:
            indices = [reader.boundary for reader in segment.readers]
            boundaries = [
                Boundary(index, self.host.shard, self.sample_tokens, attempt=self.attempt)
                for index in (*indices, indices[-1] + 1)
            ]
            self.boundaries += boundaries
            # The stage that reads the output of another segment reports it.
            self.reported += boundaries if segment.is_last else boundaries[:-1]
            self._segments.append((segment, boundaries))

    def start(self, phase: Pass, sigma: float = 0.0) -> None:
        """Begin a pass. ``sigma`` is the standard deviation of its noise."""
        self._sigma, self._draws = sigma, 0
        for boundary in self.boundaries:
            boundary.start(phase)

    def finish_statistics(self, microbatches: int, *, once: bool = False) -> None:
        """Compute the norms of the residual branches after the statistics pass.

        Raises SnipError if the microbatches did not pass a boundary equally often forward and backward, or with
        ``once`` not exactly once each.
        """
        for boundary in self.boundaries:
            runs = len(boundary.h)
            if runs == 0 or runs % microbatches or runs != len(boundary.r) or (once and runs != microbatches):
                raise SnipError(
                    f"sub-block {boundary.index} ran {len(boundary.h)} times forward and {len(boundary.r)} times"
                    f" backward in {microbatches} microbatches: SNIP takes blocks that run in each, on the residual"
                    " stream as their first argument"
                )
        for _, boundaries in self._segments:
            for low, high in itertools.pairwise(boundaries):
                low.finish_statistics(high)

    # -- hooks -------------------------------------------------------------------------------------------------
    @contextmanager
    def attached(self) -> Iterator[None]:
        """Install the hooks inside this context."""
        with ExitStack() as stack:
            if self.host.hook_input is not None:  # first, because the first block's boundary records the noise
                stack.callback(self.host.hook_input(self._add_noise).remove)
            for segment, boundaries in self._segments:
                for reader, boundary in zip(segment.readers, boundaries, strict=False):
                    hook = self._on_input(boundary, reader)
                    stack.callback(reader.module.register_forward_pre_hook(hook, with_kwargs=True).remove)
                stack.callback(segment.output.register_forward_hook(self._on_output(boundaries[-1])).remove)
            yield

    def _add_noise(self, stream: torch.Tensor) -> torch.Tensor:
        if self.host.is_recomputing():  # the first block runs once more, on the same microbatch
            self._draws -= 1
        if not self._sigma:
            return stream
        noisy: torch.Tensor | None = self.attempt(lambda: stream + self._draw(stream))
        return stream if noisy is None else noisy

    def _on_output(self, boundary: Boundary) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled() and not self._is_repetition(boundary):
                boundary.on_forward(output[0] if isinstance(output, tuple) else output)

        return hook

    def _on_input(self, boundary: Boundary, reader: StreamReader) -> Callable[..., None]:
        """Return a hook that records the stream which a module reads.

        If whole blocks are recomputed, the first forward may run without gradients, and the second one is recorded. If
        both run with gradients, those of the first forward's tensors are complete, and it is recorded. If a norm alone
        is recomputed, its first forward runs without gradients on a tensor of the outer graph, and it is recorded. Its
        second forward runs on a detached copy, which would miss the gradient of the residual branch.
        """

        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled() != reader.recomputed and not self._is_repetition(boundary):
                boundary.on_forward(args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()))))

        return hook

    def _is_repetition(self, boundary: Boundary) -> bool:
        return boundary.has_forward and self.host.is_recomputing()

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        """Return Gaussian noise [s(/tp), b, hidden] that depends on global microbatch, token and feature."""
        context = self.context
        microbatch = self._draws * context.dp_size + context.dp_rank
        self._draws += 1
        seed = derive_seed(self.seed, context.step, microbatch, *_EMBEDDING)
        rows, hidden = like.numel() // like.shape[-1], like.shape[-1]
        first = self.host.shard.first_row(rows)
        tokens = torch.arange(first, first + rows, device=like.device)
        noise = random_normal(seed, tokens, torch.arange(hidden, device=like.device))
        return (noise * self._sigma).view(like.shape).to(like.dtype)

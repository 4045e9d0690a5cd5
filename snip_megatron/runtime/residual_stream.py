"""Hooks on the residual stream that record statistics at its boundaries and add the noise of probes."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from snip_megatron.layers.context import StepContext
from snip_megatron.numerics.quantize import derive_seed, random_normal
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.host import Host, Place, Strand
from snip_megatron.sensitivity.recorder import Boundary, Pass

_EMBEDDING = (0, 0)  # of the seeds of the noise


class ResidualStream:
    """The boundaries of this rank's model chunks: residual streams before each sub-block, and after the last one.

    ``context`` is the state that the converted linears share, ``sample_tokens`` the setting ``probe_tokens``, ``seed``
    that of the noise. The sums of the boundaries ``reported`` go to the table. Each is reported by one pipeline stage.
    """

    def __init__(self, host: Host, context: StepContext, sample_tokens: int, seed: int) -> None:
        self._host = host
        self._context = context
        self._seed = seed
        self.reported: list[Boundary] = []
        self._pairs: list[tuple[Boundary, Boundary]] = []
        self._strands: list[tuple[Strand, list[Boundary]]] = []
        self._enter = [chunk.enter for chunk in host.chunks if chunk.enter is not None]
        self._noise = 0.0
        self._draws = 0
        for strand in (strand for chunk in host.chunks for strand in chunk.strands):
            indices = [place.boundary for place in strand.places]
            found = [Boundary(index, host.shard, sample_tokens) for index in (*indices, indices[-1] + 1)]
            self._pairs += itertools.pairwise(found)
            self.reported += found if strand.ends else found[:-1]  # else another stage reports the output
            self._strands.append((strand, found))

    @property
    def all(self) -> list[Boundary]:
        """All boundaries of this rank, including the outputs of its chunks that another stage reports."""
        return list({id(b): b for pair in self._pairs for b in pair}.values())

    def start(self, phase: Pass, sigma: float = 0.0) -> None:
        """Begin a pass. ``sigma`` is the standard deviation of its noise."""
        self._noise, self._draws = sigma, 0
        for boundary in self.all:
            boundary.start(phase)

    def finish_statistics(self, microbatches: int, *, once: bool = False) -> None:
        """Compute the norms of the residual branches after the statistics pass. Raises SnipError if a boundary was not
        passed equally often in each microbatch, or ``once``, forward and backward.
        """
        for boundary in self.all:
            runs = len(boundary.h)
            if runs == 0 or runs % microbatches or runs != len(boundary.r) or (once and runs != microbatches):
                raise SnipError(
                    f"sub-block {boundary.index} ran {len(boundary.h)} times forward and {len(boundary.r)} times"
                    f" backward in {microbatches} microbatches: SNIP takes blocks that run in each, on the residual"
                    " stream as their first argument"
                )
        for low, high in self._pairs:
            low.finish_statistics(high)

    # -- hooks -------------------------------------------------------------------------------------------------
    @contextmanager
    def attached(self) -> Iterator[None]:
        """Install the hooks inside this context."""
        with ExitStack() as stack:
            for enter in self._enter:  # first, because a hook on the first block's input records what it reads
                stack.callback(enter(self._enters).remove)
            for strand, boundaries in self._strands:
                for place, boundary in zip(strand.places, boundaries, strict=False):
                    hook = self._on_input(boundary, place)
                    stack.callback(place.module.register_forward_pre_hook(hook, with_kwargs=True).remove)
                stack.callback(strand.output.register_forward_hook(self._on_output(boundaries[-1])).remove)
            yield

    def _enters(self, stream: torch.Tensor) -> torch.Tensor:
        if self._host.recomputing():  # the first block runs once more, on the same microbatch
            self._draws -= 1
        return stream + self._draw(stream) if self._noise else stream

    def _on_output(self, tail: Boundary) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled() and not self._repeats(tail):
                tail.on_forward(output[0] if isinstance(output, tuple) else output)

        return hook

    def _on_input(self, boundary: Boundary, place: Place) -> Callable[..., None]:
        """Return a hook that records the stream which a module reads.

        Under recomputation of whole blocks the first forward runs without gradients, and only the second is recorded,
        or both run with gradients, and those of the first forward's tensors are complete. Where a norm alone is
        recomputed, its first forward runs without gradients on a tensor of the outer graph and is recorded: the second
        one runs on a detached copy, which would miss the gradient of the residual branch.
        """

        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled() != place.recomputed and not self._repeats(boundary):
                boundary.on_forward(args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()))))

        return hook

    def _repeats(self, boundary: Boundary) -> bool:
        return boundary.seen and self._host.recomputing()

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        """Draw Gaussian noise [s(/tp), b, hidden] that depends on global microbatch, token and feature."""
        context = self._context
        microbatch = self._draws * context.dp_size + context.dp_rank
        self._draws += 1
        seed = derive_seed(self._seed, context.step, microbatch, *_EMBEDDING)
        rows, hidden = like.numel() // like.shape[-1], like.shape[-1]
        first = self._host.shard.first_row(rows)
        tokens = torch.arange(first, first + rows, device=like.device)
        noise = random_normal(seed, tokens, torch.arange(hidden, device=like.device))
        return (noise * self._noise).view(like.shape).to(like.dtype)

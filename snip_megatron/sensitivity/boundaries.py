"""The residual stream at the boundaries between sub-blocks: h_b, r_b = ∂L/∂h_b, and their response to noise.

Boundary b is the input of sub-block b (2i: attention of layer i, 2i + 1: its MLP). Boundary 2L is the output of the
last layer. Rows are tokens. Under sequence parallelism a rank holds a contiguous share of them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from snip_megatron.sensitivity.recorder import Pass
from snip_megatron.sensitivity.squares import sample_rows, sum_squares
from snip_megatron.sensitivity.table import BOUNDARY_COLUMNS


@dataclass(frozen=True)
class TokenShard:
    """The tokens of a microbatch that this tensor parallel rank holds of the residual stream: share ``rank`` of
    ``size`` equal contiguous ones. The size is 1 if the stream is replicated; exactly one rank then ``reports`` its
    tokens.
    """

    rank: int
    size: int
    reports: bool

    def first_row(self, local_rows: int) -> int:
        return self.rank * local_rows


@functools.lru_cache(maxsize=64)
def held_rows(shard: TokenShard, local_rows: int, count: int, device: torch.device | None = None) -> torch.Tensor:
    """Return local indices of the sampled tokens that a rank holds. Do not write to the result.

    It is cached on the device, because a copy to a GPU waits for its work.
    """
    sampled = sample_rows(local_rows * shard.size, count)
    start = shard.first_row(local_rows)
    return (sampled[(sampled >= start) & (sampled < start + local_rows)] - start).to(device)


@dataclass
class Boundary:
    """Recorder of one boundary on one rank, in the current pass ``phase``. Tensors are [s(/tp), b, hidden] and are
    flattened to tokens × hidden.

    Attributes:
        h, r: sampled h_b and r_b of each forward in the statistics pass. A layer of multi-token prediction may run
            several times for a microbatch, with backward passes in the opposite order.
        weight: factor from a sum over sampled tokens to all tokens of a microbatch.
        sums: column name → float64 scalar, this rank's share of the global sum.
    """

    index: int
    shard: TokenShard
    sample_tokens: int
    phase: Pass = Pass.STATISTICS
    h: list[torch.Tensor] = field(default_factory=list)
    r: dict[int, torch.Tensor] = field(default_factory=dict)
    weight: float = 1.0
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    _forwards: int = 0

    def start(self, phase: Pass) -> None:
        self.phase = phase
        self._forwards = 0

    @property
    def seen(self) -> bool:
        """Whether this pass has recorded a forward."""
        return self._forwards > 0

    def sampled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a float32 copy of the sampled tokens of [s, b, hidden] that this rank holds."""
        flat = tensor.detach().reshape(-1, tensor.shape[-1])
        rows = held_rows(self.shard, flat.shape[0], self.sample_tokens, flat.device)
        total = flat.shape[0] * self.shard.size
        self.weight = total / max(min(total, self.sample_tokens), 1)
        return flat[rows].float()

    def on_forward(self, tensor: torch.Tensor) -> None:
        """Record the stream in the forward, and register a hook that records its gradient."""
        h, index = self.sampled(tensor), self._forwards
        if self.phase is Pass.STATISTICS:
            self.h.append(h)
            self._add("h2", h)
            if not tensor.requires_grad:  # all below it is frozen
                self.r[index] = torch.zeros_like(h)
        else:
            self._add("cn2", (self.r[index] * (h - self.h[index])).sum(1))
        self._forwards += 1
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self.on_gradient(gradient, index))  # type: ignore[no-untyped-call]

    def on_gradient(self, gradient: torch.Tensor, index: int) -> None:
        """Record the gradient of the stream of one forward: the sum of those of the branch and of the residual."""
        r = self.sampled(gradient)
        if self.phase is Pass.STATISTICS:
            self.r[index] = r
            self._add("r2", r)
        else:
            self._add("fr2", r - self.r[index])

    def finish_statistics(self, above: Boundary) -> None:
        """After the statistics pass, record what the branch between this boundary and the one ``above`` added."""
        for index, (low, high) in enumerate(zip(self.h, above.h, strict=True)):
            self._add("branch_h2", high - low)
            self._add("branch_r2", above.r[index] - self.r[index])

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        assert name in BOUNDARY_COLUMNS
        if self.shard.reports:
            value = sum_squares(tensor)
            self.sums[name] = self.sums.get(name, torch.zeros_like(value)) + value * self.weight

"""What a converted linear knows about itself and about the step it runs in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from snip_megatron.gemm.backend import REFERENCE, GemmBackend
from snip_megatron.layers.amax import is_shared, shared_amax
from snip_megatron.layers.weights import WeightCache
from snip_megatron.precision import EXPERT_KINDS, LINEAR_KINDS, Format, Gemm, LinearId

ALL_BF16 = (Format.BF16, Format.BF16, Format.BF16)
_EXPERTS, _EXPERTS_A_LINEAR = 2**48, 2**20  # numbers of experts' linears, apart from all others
GEMM_INDEX = {gemm: index for index, gemm in enumerate(Gemm)}


class BackwardRecorder(Protocol):
    """Sees every backward of a linear while a probe runs."""

    def on_backward(
        self, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, d_local: torch.Tensor, d_reduced: torch.Tensor
    ) -> None:
        """x [T, K], w [N, K], g [T, N] as this rank holds them; d_local [T, K] before its reduction over tensor
        parallel ranks, d_reduced after it (a token shard under sequence parallelism)."""


@dataclass(frozen=True)
class Forced:
    """What a measuring pass asks of one linear in one microbatch, instead of the map in force.

    Attributes:
        formats: (fprop, dgrad, wgrad).
        microbatch: number of the microbatch among those of the step, for the keys of stochastic rounding: a microbatch
            that is repeated draws the same bits.
        nudge: the GEMM whose result is changed by less than its rounding step: what rounding alone makes of it.
        compare: in the backward, report ⟨G, E⟩ with E the error fprop would have in this format.
        report: takes that figure, float64 scalar, this tensor parallel rank's share, of G as autograd gives it.
    """

    formats: tuple[Format, Format, Format] = ALL_BF16
    microbatch: int = 0
    nudge: Gemm | None = None
    compare: Format | None = None
    report: Callable[[torch.Tensor], None] | None = None


@dataclass
class StepContext:
    """State of the current step, shared by all linears of a rank; the step hook writes it, linears read it.

    Attributes:
        step: 0-based training step.
        seed: ``--snip-seed``.
        dp_rank, dp_size: position among data parallel ranks: microbatch i of a rank is global microbatch
            i·dp_size + dp_rank.
        expert_dp_rank, expert_dp_size: the same among ranks with the same experts, one of whose GEMMs has tokens of all
            expert parallel ranks.
        backend: runs the GEMMs.
        probing: a probe runs: every GEMM in bf16, backwards are recorded.
        forcing: a measuring pass runs: what it asks of a linear in the microbatch at hand. No linear is stock then:
            wgrad, forced or not, accumulates in FP32.
        bf16_eval: forwards without gradients run in bf16 whatever the map says.
    """

    step: int = 0
    seed: int = 0
    dp_rank: int = 0
    dp_size: int = 1
    expert_dp_rank: int = 0
    expert_dp_size: int = 1
    backend: GemmBackend = REFERENCE
    probing: bool = False
    forcing: Callable[[LinearHandle], Forced] | None = None
    bf16_eval: bool = False


@dataclass
class LinearHandle:
    """One converted linear of this rank.

    Attributes:
        id: its global name.
        parallel: "column" (W sharded over output features) or "row" (over input features).
        n, k: shape of the unsharded weight.
        stage: pipeline stage (pipeline parallel rank).
        tp_rank, tp_size: tensor parallel position.
        tp_group: the tensor parallel group; None where there is nobody to share a tensor with.
        out_features, in_features: int64 global indices of the local weight's rows and columns.
        context: the step's state.
        module: the converted linear; its ``weight`` is the local shard [N local, K local].
        formats: (fprop, dgrad, wgrad) in force.
        weights: the weight as this step's GEMMs take it.
        expert: global number of the expert that it belongs to; None: to none. All experts share the name.
    """

    id: LinearId
    parallel: str
    n: int
    k: int
    stage: int
    tp_rank: int
    tp_size: int
    out_features: torch.Tensor
    in_features: torch.Tensor
    context: StepContext
    module: torch.nn.Module = field(repr=False)
    formats: tuple[Format, Format, Format] = ALL_BF16
    recorder: BackwardRecorder | None = None
    tp_group: dist.ProcessGroup | None = field(default=None, repr=False)
    weights: WeightCache = field(default_factory=WeightCache, repr=False)
    expert: int | None = None
    backwards: int = field(default=0)
    """Backwards done in this step. They come in microbatch order on every schedule, recomputed or not, so this is the
    microbatch's number on this rank: what the counters of stochastic rounding need."""

    def to(self, device: torch.device) -> None:
        """Move the feature indices to where the weight is: stochastic rounding reads them in every backward."""
        if self.out_features.device != device:
            self.out_features = self.out_features.to(device)
            self.in_features = self.in_features.to(device)

    def shared_amax(self, operand: str, x: torch.Tensor, formats: Iterable[Format | str | None]) -> torch.Tensor | None:
        """max|·| of the whole of "x", "w" or "g", of which this rank holds ``x``; see :mod:`snip_megatron.layers.amax`.

        None where the rank holds all of it, or no format asks. A collective of the tensor parallel group otherwise.
        """
        return shared_amax(x, formats, self.tp_group if is_shared(self.parallel, operand) else None)

    @property
    def name(self) -> str:
        """The global name."""
        return str(self.id)

    @property
    def weight(self) -> torch.nn.Parameter:
        """The local weight."""
        weight = self.module.weight
        assert isinstance(weight, torch.nn.Parameter)
        return weight

    @property
    def index(self) -> int:
        """A number of the linear that no parallel layout changes."""
        if self.expert is None:
            return self.id.layer * len(LINEAR_KINDS) + LINEAR_KINDS.index(self.id.kind)
        of_layer = self.id.layer * len(EXPERT_KINDS) + EXPERT_KINDS.index(self.id.kind)
        return _EXPERTS + of_layer * _EXPERTS_A_LINEAR + self.expert

    def global_microbatch(self, microbatch: int) -> int:
        """Number of this rank's ``microbatch`` among those of all ranks that have the same weight."""
        if self.expert is None:
            return microbatch * self.context.dp_size + self.context.dp_rank
        return microbatch * self.context.expert_dp_size + self.context.expert_dp_rank

    @property
    def is_stock(self) -> bool:
        """Whether the next forward is Megatron's own: nothing quantised, nothing recorded."""
        if self.context.forcing is not None:
            return False
        if self.context.probing:
            return self.recorder is None
        if self.context.bf16_eval and not torch.is_grad_enabled():
            return True
        return self.formats == ALL_BF16

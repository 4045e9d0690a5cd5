"""The description of a converted linear, and the state of the current step that all linears of a rank share.

fp8_tensor and nvfp4 have one scale for the whole tensor. If each rank computed it from its shard, the scale would
depend on the tensor parallel layout. The ranks that share a matrix therefore use the maximum of their amaxes, which
costs one all-reduce of four bytes per matrix. Tensor parallel size 1 and formats with tile scales need no
communication. Under sequence parallelism the gathered tensor is quantised. Data and context parallel ranks do not take
part, because the microbatch of a rank is a tensor of its own.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from snip_megatron.layers.spans import Spans
from snip_megatron.layers.weights import GraphedWeight, WeightCache
from snip_megatron.numerics.products.backend import REFERENCE, GemmBackend
from snip_megatron.numerics.quantize.device_keys import KeyWords
from snip_megatron.numerics.quantize.formats import SPECS, Scaling
from snip_megatron.numerics.quantize.operands import GradientKeys, OperandSpec
from snip_megatron.numerics.quantize.reference import ROTATED, Rotation, rotate
from snip_megatron.numerics.quantize.rounding import derive_seeds
from snip_megatron.precision import ALL_BF16, Format, Formats, Gemm, LinearId

_EXPERTS, _EXPERTS_A_LINEAR = 2**48, 2**20  # the indices of experts' linears start above all others
_SIGNS = 0x486164616D617264  # a stream of its own for the signs of Hadamard transforms
_SHARDED = {"column": ("w", "g"), "row": ("x", "w"), "whole": ()}
"""Operands of which each tensor parallel rank holds a shard. X of a column parallel linear and G of a row parallel one
are whole on every rank, under sequence parallelism after the gather."""
GEMM_INDEX = {gemm: index for index, gemm in enumerate(Gemm)}
GRADIENT_GEMMS = GEMM_INDEX[Gemm.DGRAD], GEMM_INDEX[Gemm.WGRAD]  # those that read G


_SCALED = frozenset(fmt for fmt, spec in SPECS.items() if spec.scaling in (Scaling.FP32_TENSOR, Scaling.E4M3_FP32))

WHOLE_TENSOR = _SCALED - ROTATED  # formats that have one scale for the whole tensor, from the amax of the tensor itself

ROTATED_TENSOR = _SCALED & ROTATED
"""Formats that have one scale for the whole tensor, from the amax of its Hadamard transform."""

_MAGNITUDE = 0x7FFFFFFF


class BackwardRecorder(Protocol):
    """Receives the tensors of every backward of a linear during a probe."""

    def on_backward(
        self, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, d_local: torch.Tensor, d_reduced: torch.Tensor
    ) -> None:
        """Record one backward.

        Args:
            x, w, g: X [T, K], W [N, K] and G [T, N] as this rank holds them.
            d_local: the input gradient [T, K] before its reduction over tensor parallel ranks.
            d_reduced: the input gradient after that reduction; a token shard under sequence parallelism.
        """


@dataclass(frozen=True)
class Override:
    """The request of a measuring pass to one linear in one microbatch. It replaces the formats of the map."""

    formats: Formats = ALL_BF16  # formats of (fprop, dgrad, wgrad)
    backend: GemmBackend | None = None  # what multiplies in the pass. None: the backend of all linears


@dataclass
class StepContext:
    """State of the current step, shared by all linears of a rank. The step hooks write it and the linears read it."""

    step: int = 0
    seed: int = 0
    # dp_rank, dp_size: data parallel rank and size. Microbatch i of a rank is global microbatch i·dp_size + dp_rank
    dp_rank: int = 0
    dp_size: int = 1
    # expert_dp_rank, expert_dp_size: rank and size of the expert data parallel group, the ranks that hold the same
    # experts. A GEMM of an expert has tokens of all expert parallel ranks
    expert_dp_rank: int = 0
    expert_dp_size: int = 1
    backend: GemmBackend = REFERENCE
    probing: bool = False  # whether a probe is running. All GEMMs then run in bf16, and backwards are recorded
    # during a measuring pass, a function that returns what the pass requests of a linear in the current microbatch;
    # None otherwise. During a measuring pass no linear runs Megatron's own code, so that every wgrad accumulates in
    # FP32
    override: Callable[[LinearHandle], Override] | None = None
    # whether forwards without gradients run in bf16 under any map, of modules in evaluation mode (``module.eval()``).
    # Forwards of training have no gradients either where they are recomputed later
    bf16_eval: bool = False
    # whether linears of Transformer Engine run their own GEMMs in the formats of the map (``--snip-gemm
    # transformer_engine``). Probes and measuring passes use ``backend``
    use_te_recipe: bool = False
    map_is_quantized: bool = False  # whether the map in force quantises any GEMM of the model
    # whether data parallel ranks shard the weights, so that a linear has its weight only while it runs. The weight is
    # then quantised in every pass, and its gradient goes to autograd, whose hooks reduce it
    fsdp_sharded: bool = False

    @property
    def gemm_backend(self) -> str:
        """Name of what runs the GEMMs of training, as the run directory records it."""
        return "transformer_engine" if self.use_te_recipe else self.backend.name


@dataclass
class GraphedState:
    """What a linear in CUDA graphs reads from the device."""

    # the quantised weight. Probes and measuring passes use :attr:`LinearState.weights` also with graphs
    weight: GraphedWeight
    next_keys: Callable[[], KeyWords]  # returns the keys of stochastic rounding of the next backward
    signs: torch.Tensor  # the signs of this step's Hadamard transforms, int32 [1]


@dataclass
class LinearState:
    """What changes of a linear while it trains."""

    position: int = 0  # position of the linear in the global order of the model's linears, which the registry sets
    formats: Formats = ALL_BF16  # formats of (fprop, dgrad, wgrad) in the map in force
    recorder: BackwardRecorder | None = None  # receives the backwards of probes. None if the linear is not recorded
    weights: WeightCache = field(default_factory=WeightCache)  # the quantised weight of this step
    graphed: GraphedState | None = None  # None without CUDA graphs
    # whether SwiGLU, of this linear's output or as its input, may be fused with quantisation
    beside_swiglu: bool = False
    # wgrads that are still to run, in the order of their backwards, of a linear that delays them
    delayed: deque[Callable[[], None]] = field(default_factory=deque)
    spans: Spans | None = None  # times Megatron's own code of the linear. None if it is not timed
    # number of backwards in this step so far. Every pipeline schedule runs backwards in microbatch order, with and
    # without recomputation. In a backward this is therefore the index of the microbatch on this rank, which enters the
    # keys of stochastic rounding
    backwards: int = 0


@dataclass(frozen=True, eq=False)
class LinearHandle:
    """The identity of one converted linear of this rank."""

    id: LinearId
    # "column" (W is sharded over output features), "row" (over input features) or "whole" (every tensor parallel rank
    # has all of it)
    parallel: str
    # n, k: shape of the unsharded weight
    n: int
    k: int
    stage: int
    tp_rank: int
    tp_size: int
    # out_features, in_features: int64 global indices of the local weight's rows and columns
    out_features: torch.Tensor
    in_features: torch.Tensor
    context: StepContext
    module: torch.nn.Module = field(repr=False)
    # the tensor parallel group. None if no tensor is sharded. Ranks that share a whole linear's tokens have one
    tp_group: dist.ProcessGroup | None = field(default=None, repr=False)
    # global index of the expert that the linear belongs to. None if it belongs to none. The same linear of all experts
    # of a layer has one name
    expert: int | None = None
    parameter: str = "weight"  # name of the module's parameter that is the local shard of the weight [N local, K local]
    delays: bool = False  # whether wgrad runs when the module's ``backward_dw`` is called, not in the backward
    state: LinearState = field(default_factory=LinearState, repr=False)

    @property
    def name(self) -> str:
        return str(self.id)

    @property
    def weight(self) -> torch.nn.Parameter:
        """The local shard of the weight."""
        weight = getattr(self.module, self.parameter)
        weight = getattr(weight, "orig_param", weight)  # between passes, Megatron-FSDP puts the rank's share there
        assert isinstance(weight, torch.nn.Parameter)
        return weight

    @functools.cached_property
    def shard(self) -> tuple[int, int, torch.dtype]:
        """Rows, columns and dtype of the local shard of the weight, read at the first pass."""
        n, k = self.weight.shape[-2:]  # of one expert, where one parameter holds all of them
        return n, k, self.weight.dtype

    @property
    def formats(self) -> Formats:
        """Formats of (fprop, dgrad, wgrad) in the map in force."""
        return self.state.formats

    @property
    def index(self) -> int:
        """An integer that identifies the linear and is the same under every parallel layout."""
        position = self.state.position
        return position if self.expert is None else _EXPERTS + position * _EXPERTS_A_LINEAR + self.expert

    @functools.cached_property
    def paired(self) -> bool:
        """Whether neighbouring output features are pairs (2i, 2i + 1)."""
        features = self.out_features.cpu()
        even = features[: features.numel() // 2 * 2 : 2]
        return bool((features[::2] % 2 == 0).all() and (features[1::2] == even + 1).all())

    @property
    def shares_tokens(self) -> bool:
        """Whether every tensor parallel rank has all of the weight and a share of the tokens."""
        return self.parallel == "whole" and self.tp_group is not None

    @property
    def repeats(self) -> bool:
        """Whether another tensor parallel rank reports the weight, because it has the same one."""
        return self.parallel == "whole" and self.tp_rank > 0

    @functools.cached_property
    def columns(self) -> torch.Tensor:
        """The output features on the weight's device. Stochastic rounding reads them in every backward."""
        with torch.inference_mode(False):  # a validation may make them for training
            return self.out_features.to(self.weight.device)

    def global_microbatch(self, microbatch: int) -> int:
        """Return the index of this rank's ``microbatch`` among those of all ranks that have the same weight."""
        if self.expert is None:
            return microbatch * self.context.dp_size + self.context.dp_rank
        return microbatch * self.context.expert_dp_size + self.context.expert_dp_rank

    @property
    def is_stock(self) -> bool:
        """Whether the next forward runs Megatron's own linear, because nothing is quantised or recorded."""
        context = self.context
        if context.override is not None:
            return False
        if context.probing:
            return self.state.recorder is None
        if context.bf16_eval and not torch.is_grad_enabled() and not self.module.training:
            return True
        return self.state.formats == ALL_BF16 and not self._groups_bf16

    @property
    def _groups_bf16(self) -> bool:
        """True if BF16 experts use our grouped kernel. False under an all-BF16 map, which stays bitwise Megatron's."""
        context = self.context
        if not context.map_is_quantized or context.use_te_recipe or self.parameter == "weight":
            return False
        return Format.BF16 in context.backend.grouped(*self.shard).in_one_launch

    @property
    def runs_recipe(self) -> bool:
        """Whether the next forward, unless it is stock, is Transformer Engine's own in the formats of the map."""
        return self.context.use_te_recipe and self.context.override is None and not self.context.probing

    # -- how operands are quantised ------------------------------------------------------------------------------
    def spec(
        self,
        operand: str,
        x: torch.Tensor,
        rowwise: Format | None,
        columnwise: Format | None,
        keys: GradientKeys | None = None,
        *,
        on_device: bool = False,
    ) -> OperandSpec:
        """Return how an operand is quantised. It may be a collective of the tensor parallel group.

        Args:
            operand: "x", "w" or "g".
            x: this rank's shard of the operand [..., features], with all tokens.
            rowwise, columnwise: formats of the two GEMMs. None stands for a GEMM that does not run.
            keys: keys of stochastic rounding of G.
            on_device: see :meth:`rotation`.
        """
        amax = self.shared_amax(operand, x, (rowwise, columnwise))
        rotation = None if operand == "w" else self.rotation(operand, x, columnwise, on_device=on_device)
        return OperandSpec(rowwise, columnwise, operand == "w", amax, keys, rotation)

    def shared_amax(self, operand: str, x: torch.Tensor, formats: Iterable[Format | None]) -> torch.Tensor | None:
        """Return the amax of the unsharded operand, FP32 and 0-dim. It is NaN if any shard holds a NaN.

        Returns None, without communication, if this rank holds the whole operand or if none of ``formats`` has a scale
        for the whole tensor. Otherwise this is a collective of the tensor parallel group.
        """
        group = self._sharing(operand)
        if group is None or WHOLE_TENSOR.isdisjoint(formats):
            return None
        return largest_of_shards(amax_of(x), group)

    def unsharded_amax(self, operand: str, amax: torch.Tensor) -> torch.Tensor:
        """Return the amax of the unsharded operand, from the amax of this rank's shard (FP32 and 0-dim).

        If the operand is sharded over ranks, this is a collective of the tensor parallel group.
        """
        return largest_of_shards(amax, self._sharing(operand))

    def _sharing(self, operand: str) -> dist.ProcessGroup | None:
        """Return the group whose ranks hold shards of an operand, or None if this rank holds the whole operand."""
        return self.tp_group if operand in _SHARDED[self.parallel] else None

    def rotation(
        self, operand: str, x: torch.Tensor, wgrad: Format | None, *, on_device: bool = False
    ) -> Rotation | None:
        """Return the transform of an operand of wgrad, or None if its format has no Hadamard transform.

        If the format has a scale for the whole tensor, and ranks hold shards of the operand, this is a collective.

        Args:
            operand: "x" or "g".
            x: this rank's shard of the operand [..., features], with all tokens.
            wgrad: its format. None if wgrad does not run.
            on_device: take the signs from the device if the linear is in CUDA graphs.
        """
        if wgrad is None or wgrad not in ROTATED:
            return None
        graphed = self.state.graphed if on_device else None
        signs = signs_of([self], self.context.seed, self.context.step)[0] if graphed is None else graphed.signs
        signs, group = signs if SPECS[wgrad].random_signs else 0, self._sharing(operand)
        if group is None or wgrad not in ROTATED_TENSOR:
            return Rotation(signs)
        return Rotation(signs, largest_of_shards(amax_of(rotate(x.reshape(-1, x.shape[-1]), signs)), group))


def signs_of(linears: Sequence[LinearHandle], seed: int, step: int) -> list[int]:
    """Return the signs of each linear's Hadamard transforms in a step.

    They depend on the seed, the step and the linear, and so are the same on every layout and after a resume. All
    microbatches of a step have the same, because X is transformed in a forward and G in a later backward.
    """
    words = derive_seeds((seed, step, _SIGNS), [handle.index for handle in linears])
    return [word >> 48 for word in words]


# -- the amax of a matrix whose shards lie on several ranks ------------------------------------------------------------
def largest_of_shards(amax: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the maximum of ``amax`` (FP32 and 0-dim) over the ranks of ``group``, or ``amax`` if there is no group.

    The result is NaN if the amax of any rank is NaN. With a group this is a collective of it.
    """
    if group is None:
        return amax
    # FP32 magnitudes have the order of their bits as integers, with NaN above all numbers. A maximum over floats may
    # drop a NaN.
    bits = amax.view(1).view(torch.int32).bitwise_and(_MAGNITUDE)
    dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)
    return bits.view(torch.float32).view(())


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """Return max|x|, FP32 and 0-dim. It is NaN if x holds a NaN."""
    x = x.detach()
    amax = torch.linalg.vector_norm(x, float("inf")) if x.numel() else x.new_zeros(())
    return amax.to(torch.float32)

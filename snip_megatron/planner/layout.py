"""The distribution of a model over ranks: Megatron's parallelism, batch sizes, and the blocks of each stage."""

from __future__ import annotations

from dataclasses import dataclass

from snip_megatron.config.run import COMMUNICATION
from snip_megatron.errors import SnipError
from snip_megatron.planner.models import ModelShape
from snip_megatron.precision import DENSE_LAYER
from snip_megatron.timing.shapes import LinearShape, local_shape

RECOMPUTE = ("none", "selective", "full")
CUDA_GRAPHS = ("none", "local", "transformer_engine", "full_iteration")
GRAPHS_WITHOUT_PIPELINE = {
    "full_iteration": "Megatron waits for the device between stages, which no graph holds",
    "local": "Megatron cannot free the output of a stage in the steps before the capture, and ends",
}
"""Implementation of CUDA graphs → why it cannot run a pipeline."""
_TILE = 128
_MOST = 2**31
_PADDING = 128  # Megatron pads the vocabulary to a multiple of this times the tensor parallel size


def microbatches_in_flight(microbatches: int, stage: int, pp: int, vpp: int = 1) -> float:
    """Return the peak number of microbatches whose activations of a whole stage are kept; see Layout.in_flight."""
    if vpp == 1:
        return min(float(microbatches), float(pp - stage))
    chunks = 2 * (pp - stage - 1) + (vpp - 1) * pp + 1
    return min(float(microbatches), chunks / vpp)


@dataclass(frozen=True)
class Layout:
    """The sizes of a training, with the meaning of Megatron's arguments.

    Attributes:
        model: the model.
        tp: tensor parallel size.
        pp: pipeline parallel size.
        vpp: virtual pipeline size, the number of chunks of each stage.
        dp: data parallel size.
        seq_length: tokens of a sequence.
        micro_batch_size: sequences of a microbatch.
        global_batch_size: sequences of a step.
        sequence_parallel: ``--sequence-parallel``.
        recompute: what the backward recomputes: ``none``, ``selective`` (attention) or ``full`` (whole blocks).
        distributed_optimizer: ``--use-distributed-optimizer``.
        overlap_grad_reduce: ``--overlap-grad-reduce``.
        overlap_param_gather: ``--overlap-param-gather``.
        embedding_as_layer: ``--account-for-embedding-in-pipeline-split``.
        loss_as_layer: ``--account-for-loss-in-pipeline-split``.
        cuda_graph_impl: ``--cuda-graph-impl``: ``none``, ``local``, ``transformer_engine`` or ``full_iteration``.
        communication: ``--snip-communication``: ``bf16``, ``gather`` or ``all``.
        gradient_reduction: ``--snip-gradient-reduction``: ``fp32`` or ``fp8``.
        gradient_accumulation_fusion: False with ``--no-gradient-accumulation-fusion``, which SNIP gives where Apex is
            missing.

    Raises:
        SnipError: Megatron or SNIP would refuse the sizes.
    """

    model: ModelShape
    tp: int
    pp: int
    vpp: int
    dp: int
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    sequence_parallel: bool = False
    recompute: str = "none"
    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    embedding_as_layer: bool = False
    loss_as_layer: bool = False
    cuda_graph_impl: str = "none"
    communication: str = "bf16"
    gradient_reduction: str = "fp32"
    gradient_accumulation_fusion: bool = True

    def __post_init__(self) -> None:
        self._check_positive()
        self._check_tensor_parallel()
        self._check_pipeline()
        self._check_batch()
        self._check_communication()
        self._check_graphs()

    # -- derived -------------------------------------------------------------------------------------------------
    @property
    def ranks(self) -> int:
        """Total number of GPUs."""
        return self.tp * self.pp * self.dp

    @property
    def microbatches(self) -> int:
        """Microbatches of a training step on one data parallel rank."""
        return self.global_batch_size // (self.micro_batch_size * self.dp)

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.seq_length * self.micro_batch_size

    @property
    def bubble(self) -> float:
        """The step time divided by the time of the slowest stage's work: 1 + (pp − 1) / (vpp · microbatches)."""
        return 1.0 + (self.pp - 1) / (self.vpp * self.microbatches)

    @property
    def vocabulary(self) -> int:
        """Rows of the word embedding, padded as Megatron does."""
        step = _PADDING * self.tp
        return -(-self.model.vocabulary // step) * step

    @property
    def attention_features(self) -> tuple[int, int]:
        """Features of the queries and of the keys of a rank's heads. A rank has at least one key-value head."""
        model = self.model
        return model.heads // self.tp * model.head_size, max(1, model.groups // self.tp) * model.head_size

    @property
    def chunks(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Blocks by stage and chunk. Chunk c of stage s follows chunk c of stage s − 1."""
        per_chunk = self._layers // (self.pp * self.vpp)
        skipped = int(self.embedding_as_layer)
        stages: list[list[tuple[int, ...]]] = [[] for _ in range(self.pp)]
        for place in range(self.pp * self.vpp):
            layers = range(place * per_chunk - skipped, (place + 1) * per_chunk - skipped)
            stages[place % self.pp].append(tuple(x for x in layers if 0 <= x < self.model.blocks))
        return tuple(tuple(chunks) for chunks in stages)

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Blocks by stage."""
        return tuple(tuple(block for chunk in chunks for block in chunk) for chunks in self.chunks)

    def stage_of(self) -> dict[int, int]:
        """Return block → stage."""
        return {block: stage for stage, blocks in enumerate(self.stages) for block in blocks}

    def linear_shapes(self) -> dict[str, LinearShape]:
        """Return the shapes of a block's linears on one rank, by kind."""
        return {
            kind: local_shape(
                kind,
                *self.model.linears[kind],
                tokens=self.tokens,
                tensor_parallel=self.tp,
                microbatches=self.microbatches,
                sequence_parallel=self.sequence_parallel,
                recompute=self.recompute == "full",
                fused_accumulation=self.gradient_accumulation_fusion,
            )
            for kind in DENSE_LAYER
        }

    def stage_parameters(self, stage: int) -> int:
        """Return the number of parameters on a rank of ``stage``: linears, norms, embedding and output layer."""
        output = stage == self.pp - 1 and (not self.model.tied or self.pp > 1)
        return self.probed_parameters(stage) + (self.vocabulary * self.model.hidden // self.tp if output else 0)

    def probed_parameters(self, stage: int) -> int:
        """Return the number of parameters on a rank of ``stage`` whose gradients a probe reads.

        These are all parameters except those of the output layer.
        """
        model = self.model
        count = len(self.stages[stage]) * (model.block_weights // self.tp + 2 * model.hidden)
        if stage == 0:
            count += self.vocabulary * model.hidden // self.tp
        return count + (model.hidden if stage == self.pp - 1 else 0)

    def in_flight(self, stage: int, microbatches: int | None = None) -> float:
        """Return the peak number of microbatches whose activations of the whole stage are kept.

        The schedule is 1F1B, or Megatron's interleaved schedule under a virtual pipeline, whose chunks in flight are
        counted as shares of the stage.

        Args:
            stage: the pipeline stage.
            microbatches: microbatches of the call of the schedule; None for those of a training step.
        """
        most = self.microbatches if microbatches is None else microbatches
        return microbatches_in_flight(most, stage, self.pp, self.vpp)

    # -- checks --------------------------------------------------------------------------------------------------
    @property
    def _layers(self) -> int:
        return self.model.blocks + self.embedding_as_layer + self.loss_as_layer

    def _check_positive(self) -> None:
        names = ("tp", "pp", "vpp", "dp", "seq_length", "micro_batch_size", "global_batch_size")
        for name in names:
            value = getattr(self, name)
            if not 1 <= value <= _MOST:
                raise SnipError(f"--{name.replace('_', '-')} {value}: must be a whole number from 1 to {_MOST}")
        if self.recompute not in RECOMPUTE:
            raise SnipError(f"--recompute {self.recompute}: choose one of {', '.join(RECOMPUTE)}")

    def _check_tensor_parallel(self) -> None:
        model, tp = self.model, self.tp
        if model.heads % tp:
            raise SnipError(f"--tp {tp}: {model.name} has {model.heads} heads, which cannot be split over {tp} ranks")
        if model.groups % tp and tp % model.groups:
            raise SnipError(
                f"--tp {tp}: must be a multiple or divisor of the {model.groups} key-value heads of {model.name}"
            )
        if model.ffn % tp:
            raise SnipError(f"--tp {tp}: {model.name}'s MLP of {model.ffn} features cannot be split over {tp} ranks")
        if self.sequence_parallel and self.seq_length % tp:
            raise SnipError(f"--sequence-parallel: --seq-length {self.seq_length} cannot be split over --tp {tp} ranks")

    def _check_communication(self) -> None:
        if self.gradient_reduction != "fp32" and (self.dp == 1 or not self.distributed_optimizer):
            raise SnipError(
                f"--gradient-reduction {self.gradient_reduction}: needs --dp 2 or more, without"
                " --no-distributed-optimizer"
            )
        if self.gradient_reduction != "fp32" and self.tp > 1 and not self.sequence_parallel:
            raise SnipError(
                f"--gradient-reduction {self.gradient_reduction}: needs --sequence-parallel with --tp {self.tp}"
            )
        here = f"--communication {self.communication}"
        if self.communication not in COMMUNICATION:
            raise SnipError(f"{here}: choose one of {', '.join(COMMUNICATION)}")
        if self.communication == "bf16":
            return
        if not self.sequence_parallel or self.tp == 1:
            raise SnipError(f"{here}: needs --sequence-parallel and --tp 2 or more")
        if self.tokens % (self.tp * _TILE):
            raise SnipError(
                f"{here}: the {self.tokens} tokens of a microbatch on {self.tp} ranks are {self.tokens / self.tp:g}"
                f" each, no multiple of {_TILE}, so that shards cut tiles"
            )

    def _check_graphs(self) -> None:
        if self.cuda_graph_impl not in CUDA_GRAPHS:
            raise SnipError(f"--cuda-graph-impl {self.cuda_graph_impl}: choose one of {', '.join(CUDA_GRAPHS)}")
        if self.pp > 1 and self.cuda_graph_impl in GRAPHS_WITHOUT_PIPELINE:
            raise SnipError(
                f"--cuda-graph-impl {self.cuda_graph_impl} cannot be combined with --pp {self.pp}:"
                f" {GRAPHS_WITHOUT_PIPELINE[self.cuda_graph_impl]}; use --cuda-graph-impl transformer_engine"
            )

    def _check_pipeline(self) -> None:
        chunks = self.pp * self.vpp
        if self.vpp > 1 and self.pp == 1:
            raise SnipError(f"--vpp {self.vpp}: a virtual pipeline needs --pp of 2 or more")
        if self._layers % chunks:
            extra = self._layers - self.model.blocks
            raise SnipError(
                f"--pp {self.pp} --vpp {self.vpp}: {self.model.name} has {self.model.blocks} blocks"
                f"{f' (with embedding and loss {self._layers})' if extra else ''}, not divisible by {chunks};"
                " choose other sizes, or count embedding and loss as layers (--account-for-embedding-in-pipeline-split"
                " and --account-for-loss-in-pipeline-split)"
            )
        if any(not blocks for blocks in self.stages):
            raise SnipError(
                f"--pp {self.pp}: {self.model.name} has {self.model.blocks} blocks, a stage would hold none"
            )

    def _check_batch(self) -> None:
        each = self.micro_batch_size * self.dp
        if self.global_batch_size % each:
            raise SnipError(
                f"--global-batch-size {self.global_batch_size}: must be a multiple of --micro-batch-size × --dp, {each}"
            )
        if self.vpp > 1 and self.microbatches % self.pp:
            raise SnipError(
                f"--vpp {self.vpp}: an interleaved schedule needs microbatches ({self.microbatches}) in multiples of"
                f" --pp {self.pp}"
            )

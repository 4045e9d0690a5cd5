"""How a model is spread over ranks: Megatron's parallelism, batch sizes, and which blocks a pipeline stage holds."""

from __future__ import annotations

from dataclasses import dataclass

from snip_megatron.errors import SnipError
from snip_megatron.planner.models import ModelShape
from snip_megatron.precision import LINEAR_KINDS
from snip_megatron.solver.costs import LinearShape, local_shape

RECOMPUTE = ("none", "selective", "full")
_PADDING = 128  # Megatron pads the vocabulary to a multiple of this times the tensor parallel size


def microbatches_in_flight(microbatches: int, stage: int, pp: int, vpp: int = 1) -> float:
    """See :meth:`Layout.in_flight`."""
    if vpp == 1:
        return min(float(microbatches), float(pp - stage))
    chunks = 2 * (pp - stage - 1) + (vpp - 1) * pp + 1
    return min(float(microbatches), chunks / vpp)


@dataclass(frozen=True)
class Layout:
    """Sizes as Megatron's arguments of the same names give them.

    Attributes:
        model: the model.
        tp, pp, vpp, dp: tensor parallel, pipeline, virtual pipeline (chunks a stage) and data parallel sizes.
        seq_length, micro_batch_size, global_batch_size: in tokens, sequences, sequences.
        sequence_parallel, recompute: ``--sequence-parallel``; what runs again in the backward: ``none``, ``selective``
            (attention) or ``full`` (whole blocks).
        distributed_optimizer, overlap_grad_reduce, overlap_param_gather: ``--use-distributed-optimizer`` and so on.
        embedding_as_layer, loss_as_layer: ``--account-for-embedding-in-pipeline-split``, ``--account-for-loss-…``.

    Raises SnipError on sizes that Megatron would refuse.
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

    def __post_init__(self) -> None:
        self._check_positive()
        self._check_tensor_parallel()
        self._check_pipeline()
        self._check_batch()

    # -- derived -------------------------------------------------------------------------------------------------
    @property
    def ranks(self) -> int:
        """GPUs in all."""
        return self.tp * self.pp * self.dp

    @property
    def microbatches(self) -> int:
        """Of a training step, on one data parallel rank."""
        return self.global_batch_size // (self.micro_batch_size * self.dp)

    @property
    def tokens(self) -> int:
        """Of a microbatch."""
        return self.seq_length * self.micro_batch_size

    @property
    def bubble(self) -> float:
        """Step time over the time of the slowest stage's work: 1 + (pp − 1) / (vpp · microbatches)."""
        return 1.0 + (self.pp - 1) / (self.vpp * self.microbatches)

    @property
    def vocabulary(self) -> int:
        """Rows of the word embedding, padded as Megatron does."""
        step = _PADDING * self.tp
        return -(-self.model.vocabulary // step) * step

    @property
    def chunks(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Blocks by stage and chunk: chunk c of stage s comes after chunk c of stage s − 1."""
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
        """Block → stage."""
        return {block: stage for stage, blocks in enumerate(self.stages) for block in blocks}

    def linear_shapes(self) -> dict[str, LinearShape]:
        """By kind: each of a block's linears as one rank runs it."""
        return {
            kind: local_shape(
                kind,
                *self.model.linears[kind],
                tokens=self.tokens,
                tensor_parallel=self.tp,
                microbatches=self.microbatches,
                sequence_parallel=self.sequence_parallel,
                recompute=self.recompute == "full",
            )
            for kind in LINEAR_KINDS
        }

    def stage_parameters(self, stage: int) -> int:
        """Parameters that a rank of ``stage`` holds: linears, norms, embedding and output layer."""
        model = self.model
        embedding = self.vocabulary * model.hidden // self.tp
        count = len(self.stages[stage]) * (model.block_weights // self.tp + 2 * model.hidden)
        if stage == 0:
            count += embedding
        if stage == self.pp - 1:
            count += model.hidden + (embedding if not model.tied or self.pp > 1 else 0)
        return count

    def probed_parameters(self, stage: int) -> int:
        """Parameters of a rank of ``stage`` whose gradients a probe reads: all but the output layer's."""
        model = self.model
        count = len(self.stages[stage]) * (model.block_weights // self.tp + 2 * model.hidden)
        if stage == 0:
            count += self.vocabulary * model.hidden // self.tp
        return count + (model.hidden if stage == self.pp - 1 else 0)

    def in_flight(self, stage: int, microbatches: int | None = None) -> float:
        """Microbatches whose activations of a whole stage are kept at once: 1F1B, or Megatron's interleaved schedule
        (its chunks in flight as a share of the stage). ``microbatches`` of the call; None: a training step's."""
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
            if not 1 <= value <= 2**31:
                raise SnipError(f"--{name.replace('_', '-')} {value}: must be a whole number of 1 or more")
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

"""The distribution of a model over ranks, with the meaning of Megatron's arguments: what one rank runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from snip_megatron.planner.models import Model
from snip_megatron.precision import LinearRow, Side
from snip_megatron.precision.errors import SnipError
from snip_megatron.timing.cost_model import LinearShape

RECOMPUTE = ("none", "selective", "full")
_FUSED = {Side.OUTPUT: "gradient", Side.INPUT: "input"}
_MOST = 2**31
_PADDING = 128  # Megatron pads the vocabulary to a multiple of this times the tensor parallel size


def microbatches_in_flight(microbatches: int, stage: int, pp: int, vpp: int = 1) -> float:
    """Return the peak number of microbatches whose activations of a whole stage are kept.

    The schedule is 1F1B, or Megatron's interleaved schedule under a virtual pipeline, whose chunks in flight are
    counted as shares of the stage.
    """
    if vpp == 1:
        return min(float(microbatches), float(pp - stage))
    chunks = 2 * (pp - stage - 1) + (vpp - 1) * pp + 1
    return min(float(microbatches), chunks / vpp)


@dataclass(frozen=True)
class Layout:
    """The sizes of a training, by the names of Megatron's and SNIP's arguments."""

    model: Model  # whose rows name their pipeline stages
    tp: int
    pp: int
    vpp: int  # virtual pipeline size, the number of chunks of each stage
    dp: int
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    cp: int = 1
    ep: int = 1
    etp: int | None = None  # tensor parallel size of experts. None stands for ``tp``
    sequence_parallel: bool = False
    # what the backward recomputes: ``none``, ``selective`` (``recompute_modules``) or ``full`` (the first
    # ``recompute_layers`` layers of each chunk, all of them if it is None)
    recompute: str = "none"
    recompute_layers: int | None = None
    recompute_modules: tuple[str, ...] = ("core_attn",)
    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    gradient_bytes: int = 4  # bytes of an element of a gradient: 4, or 2 with ``--grad-reduce-in-bf16``
    # False with ``--no-gradient-accumulation-fusion``, which SNIP adds without Apex
    gradient_accumulation_fusion: bool = True
    # whether the experts of a layer run grouped GEMMs: ``--moe-grouped-gemm`` with Transformer Engine
    grouped_experts: bool = False
    fused_swiglu: bool = True  # whether SwiGLU is fused with quantisation where a kernel does both

    def checked(self) -> Layout:
        """Return this layout. Raises SnipError if Megatron or SNIP would refuse its sizes."""
        for fault in self._faults():
            raise SnipError(fault)
        _ = self.shapes  # raises if ranks cannot share the features of a linear
        return self

    # -- sizes ---------------------------------------------------------------------------------------------------
    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def microbatches(self) -> int:
        """Microbatches of a training step on one data parallel rank."""
        return max(1, self.global_batch_size // (self.micro_batch_size * self.dp))

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one context parallel rank."""
        return self.seq_length * self.micro_batch_size // self.cp

    @property
    def stream(self) -> float:
        """Elements of a microbatch's residual stream on one rank."""
        return self.tokens * self.model.hidden / (self.tp if self.sequence_parallel else 1)

    @property
    def bubble(self) -> float:
        """The step time divided by the time of the slowest stage's work: 1 + (pp − 1) / (vpp · microbatches)."""
        return 1.0 + (self.pp - 1) / (self.vpp * self.microbatches)

    @property
    def vocabulary(self) -> int:
        """Rows of the word embedding, padded as Megatron does."""
        step = _PADDING * self.tp
        return -(-self.model.vocabulary // step) * step

    def in_flight(self, stage: int, microbatches: int | None = None) -> float:
        """Return :func:`microbatches_in_flight` of a training step, or of a call of so many microbatches."""
        return microbatches_in_flight(microbatches or self.microbatches, stage, self.pp, self.vpp)

    # -- linears -------------------------------------------------------------------------------------------------
    @cached_property
    def stages(self) -> tuple[tuple[tuple[LinearRow, ...], ...], ...]:
        """The rows of each layer of each stage."""
        stages: list[dict[tuple[str, int], list[LinearRow]]] = [{} for _ in range(self.pp)]
        for row in self.model.rows:
            stages[row.stage].setdefault((row.id.stack, row.id.layer), []).append(row)
        return tuple(tuple(map(tuple, layers.values())) for layers in stages)

    @cached_property
    def shapes(self) -> dict[str, LinearShape]:
        """Name of a linear → its shape on one rank."""
        return {row.name: self._shape(row) for row in self.model.rows}

    @cached_property
    def kinds(self) -> dict[str, LinearRow]:
        """Path in the layer → a row, if all linears of a path have one shape; otherwise name → row."""
        paths = {row.id.path: row for row in self.model.rows}
        if all(self.shapes[row.name] == self.shapes[paths[row.id.path].name] for row in self.model.rows):
            return paths
        return {row.name: row for row in self.model.rows}

    def matrices(self, row: LinearRow) -> int:
        """Return the number of matrices of a row on one rank: its experts."""
        return row.experts // self.ep if row.experts > 1 else 1

    def passes(self, row: LinearRow) -> int:
        """Return how often a microbatch runs a GEMM of a row: once for each matrix and prediction."""
        return self.matrices(row) if row.experts > 1 else row.active

    def recomputed(self, row: LinearRow) -> bool:
        """Return whether the backward runs the forward of a linear again."""
        if self.recompute == "selective":
            return "mlp" in self.recompute_modules and row.id.path.startswith("mlp.")
        if self.recompute == "none" or self.recompute_layers is None:
            return self.recompute == "full"
        chunk = -(-self.model.blocks // (self.pp * self.vpp))
        return row.id.layer % chunk < self.recompute_layers

    def _shape(self, row: LinearRow) -> LinearShape:
        """Tokens are taken to be spread evenly over experts."""
        tokens, tp, sequence_parallel = self.tokens, self.tp, self.sequence_parallel
        if row.experts > 1:
            etp = self.etp or tp
            tokens = max(1, tokens * row.active * self.ep * etp // (tp * row.experts))
            tp, sequence_parallel = etp, False
        grouped = row.experts > 1 and self.grouped_experts
        n, k = row.n, row.k
        split = {Side.OUTPUT: n, Side.INPUT: k, Side.NEITHER: 0}[row.sharded]
        if split % tp:
            raise SnipError(f"{row.name} [{n}, {k}]: {split} features cannot be split over {tp} ranks")
        return LinearShape(
            tokens=tokens // tp if row.sharded is Side.NEITHER and sequence_parallel else tokens,
            n=n // tp if row.sharded is Side.OUTPUT else n,
            k=k // tp if row.sharded is Side.INPUT else k,
            microbatches=self.microbatches * self.passes(row),
            gathered=row.sharded is Side.OUTPUT and sequence_parallel and tp > 1,
            forwards=2 if self.recomputed(row) else 1,
            fused_accumulation=self.gradient_accumulation_fusion,
            matrices=self.matrices(row),
            grouped=grouped,
            fused=_FUSED[row.sharded] if grouped and self.fused_swiglu else None,
        )

    # -- parameters ----------------------------------------------------------------------------------------------
    def stage_parameters(self, stage: int) -> int:
        """Return the number of parameters on a rank of ``stage``: linears, norms, embedding and output layer."""
        output = stage == self.pp - 1 and (not self.model.tied or self.pp > 1)
        return self.probed_parameters(stage) + (self.vocabulary * self.model.hidden // self.tp if output else 0)

    def probed_parameters(self, stage: int) -> int:
        """Return the number of parameters of a rank whose gradients a probe reads: all but the output layer's."""
        rows = [row for layer in self.stages[stage] for row in layer]
        shapes = [self.shapes[row.name] for row in rows]
        norms = len({row.sub_block for row in rows}) + (stage == self.pp - 1)
        embedding = self.vocabulary * self.model.hidden // self.tp if stage == 0 else 0
        return sum(shape.n * shape.k * shape.matrices for shape in shapes) + norms * self.model.hidden + embedding

    # -- checks --------------------------------------------------------------------------------------------------
    def _faults(self) -> Iterator[str]:
        """Yield what Megatron or SNIP would refuse."""
        model, tp = self.model, self.tp
        for name in ("tp", "pp", "dp", "seq_length", "micro_batch_size", "global_batch_size"):
            if not 1 <= (value := getattr(self, name)) <= _MOST:
                yield f"--{name.replace('_', '-')} {value}: must be a whole number from 1 to {_MOST}"
        if self.recompute not in RECOMPUTE:
            yield f"--recompute {self.recompute}: choose one of {', '.join(RECOMPUTE)}"
        if model.heads % tp:
            yield f"--tp {tp}: {model.name} has {model.heads} heads, which cannot be split over {tp} ranks"
        if model.groups % tp and tp % model.groups:
            yield f"--tp {tp}: must be a multiple or divisor of the {model.groups} key-value heads of {model.name}"
        if self.sequence_parallel and self.seq_length % tp:
            yield f"--sequence-parallel: --seq-length {self.seq_length} cannot be split over --tp {tp} ranks"
        step = self.micro_batch_size * self.dp
        if self.global_batch_size % step:
            yield (
                f"--global-batch-size {self.global_batch_size}: must be a multiple of --micro-batch-size × --dp, {step}"
            )

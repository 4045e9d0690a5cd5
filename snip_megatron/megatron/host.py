"""Megatron's training loop as a host of SNIP's probes."""

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.utils import get_attr_wrapped_model
from torch.utils.hooks import RemovableHandle

from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.megatron import compat
from snip_megatron.megatron.model_linears import BuiltLinear, built_linears, norm_of
from snip_megatron.planner.layout import microbatches_in_flight
from snip_megatron.precision import LinearRow, Role
from snip_megatron.runtime.host import Change, Host, LocalSink, StreamReader, StreamSegment
from snip_megatron.sensitivity.recorder import TokenShard
from snip_megatron.sensitivity.reduction import ProbeGroups
from snip_megatron.sensitivity.table import SinkRow
from snip_megatron.sensitivity.update_error import AdamWState

_EMBEDDING, _FINAL_NORM = "word_embeddings", "final_layernorm"
_SHARDED = ("use_distributed_optimizer", "use_layer_wise_distributed_optimizer", "use_torch_fsdp2")
"""Arguments that shard the optimizer's state over data parallel ranks."""


# -- the host --------------------------------------------------------------------------------------------------------
def make_host(args: argparse.Namespace, model: Sequence[torch.nn.Module], registry: LinearRegistry) -> Host:
    """Return the host of a training whose ``model`` chunks DDP has wrapped."""
    config, groups = get_attr_wrapped_model(model[0], "config"), compat.process_groups(model[0])
    tp_size, tp_rank = dist.get_world_size(groups.tp), groups.tp_rank
    sharded_tokens = bool(config.sequence_parallel) and tp_size > 1
    virtual = args.virtual_pipeline_model_parallel_size
    pass_group = config.microbatch_group_size_per_vp_stage or config.pipeline_model_parallel_size if virtual else 1
    shards = compat.ShardedParameters(model)
    rows = _sink_rows(registry.rows, config.hidden_size, args.padded_vocab_size)
    stage = next((handle.stage for handle in registry), 0)
    return Host(
        groups=groups,
        device=next(model[0].parameters()).device,
        segments=[segment for chunk in model for segment in segments_of(chunk, registry.rows)],
        hook_input=next(filter(None, map(input_hook, model)), None),
        hidden=config.hidden_size,
        shard=TokenShard(*((tp_rank, tp_size, True) if sharded_tokens else (0, 1, tp_rank == 0))),
        sinks=rows,
        local_sinks=_local_sinks(model, rows, tp_rank),
        optimizer_sharded=args.optimizer.startswith("dist_") or any(getattr(args, name, False) for name in _SHARDED),
        tokens=args.seq_length * args.micro_batch_size // args.context_parallel_size,
        pass_group=int(pass_group),
        in_flight=functools.partial(
            microbatches_in_flight, stage=stage, pp=config.pipeline_model_parallel_size, vpp=virtual or 1
        ),
        sequence_parallel=bool(config.sequence_parallel),
        recomputes_blocks=config.recompute_granularity == "full",
        full_tensor=shards.values if shards else lambda weight: weight,
        passes_alone=not shards and _passes_alone(config),
    )


def _passes_alone(config: Any) -> bool:
    """Return whether ranks exchange nothing in a pass, as under data parallelism alone."""
    kinds = ("tensor_model", "pipeline_model", "context", "expert_model")
    balanced = config.moe_router_load_balancing_type
    over_ranks = "global_aux_loss" in ([balanced] if isinstance(balanced, str) else balanced)
    return all(getattr(config, f"{kind}_parallel_size") == 1 for kind in kinds) and not over_ranks


def segments_of(chunk: torch.nn.Module, rows: Sequence[LinearRow]) -> list[StreamSegment]:
    """Return the sub-blocks of a model chunk, and the places where they read the residual stream.

    ``rows`` are the linears of the whole model that a map covers.
    """
    boundary = {row.name: row.sub_block for row in rows}
    last_sub_block = {row.id.stack: row.sub_block for row in rows}  # each MTP layer is a strand of its own
    strands: dict[int, dict[int, BuiltLinear]] = {}
    for linear in built_linears([chunk]):
        if (index := boundary.get(str(linear.id))) is not None:
            key = -1 if linear.id.stack == "decoder" else linear.id.layer
            strands.setdefault(key, {}).setdefault(index, linear)
    segments = []
    for first in strands.values():
        places = []
        for index, linear in sorted(first.items()):
            is_norm = linear.reader is not linear.writer
            recomputed = bool(is_norm and getattr(linear.writer, "recompute_pre_mlp_layernorm", False))
            places.append(StreamReader(linear.reader, index, recomputed=recomputed))
        is_last = linear.id.stack == "mtp" or index == last_sub_block["decoder"]
        segments.append(StreamSegment(places, linear.writer, is_last))
    return segments


def input_hook(chunk: torch.nn.Module) -> Callable[[Change], RemovableHandle] | None:
    """Return what installs a hook that changes the stream before the first block. None on later chunks."""
    model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
    if not getattr(model, "pre_process", False):
        return None
    # A stage that predicts further tokens embeds its tokens once more for each of them.
    period = 1 + ((getattr(model, "mtp_process", False) and model.config.mtp_num_layers) or 0)

    def enter(change: Change) -> RemovableHandle:
        calls = itertools.count()

        def hook(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return output if next(calls) % period else change(output)

        handle: RemovableHandle = model.embedding.register_forward_hook(hook)
        return handle

    return enter


def _sink_rows(rows: Sequence[LinearRow], hidden: int, padded_vocab_size: int) -> tuple[SinkRow, ...]:
    """Return the other parameters that gradient errors reach: the word embedding and the weights of norms."""
    readers = [row for row in rows if row.role is Role.READS]
    norms = {f"{row.id.stack}.layers.{row.id.layer}.{norm_of(row.id.path)}": row.sub_block for row in readers}
    end = 1 + max(row.sub_block for row in rows if row.id.stack == "decoder")
    return (
        SinkRow(f"embedding.{_EMBEDDING}", 0, padded_vocab_size * hidden),
        *(SinkRow(name, boundary, hidden) for name, boundary in norms.items()),
        SinkRow(f"decoder.{_FINAL_NORM}", end, hidden),
    )


def _local_sinks(model: Sequence[torch.nn.Module], rows: Sequence[SinkRow], tp_rank: int) -> list[LocalSink]:
    row = {sink.name: i for i, sink in enumerate(rows)}
    sinks: dict[int, LocalSink] = {}
    for chunk in model:
        gpt = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
        if gpt.pre_process:
            weight = gpt.embedding.word_embeddings.weight
            index = row[f"embedding.{_EMBEDDING}"]
            sinks[index] = LocalSink(index, weight, first_row=tp_rank * weight.shape[0])
        norms = {f"decoder.{_FINAL_NORM}": getattr(getattr(gpt.decoder, _FINAL_NORM, None), "weight", None)}
        for linear in built_linears([chunk]):
            norm = norm_of(linear.id.path)
            module = getattr(linear.writer, norm.rpartition(".")[2], None)
            weight = getattr(module, "weight", getattr(linear.module, "layer_norm_weight", None))
            norms.setdefault(f"{linear.id.stack}.layers.{linear.id.layer}.{norm}", weight)
        for name, weight in norms.items():
            if weight is not None and name in row:
                sinks[row[name]] = LocalSink(row[name], weight, replicated=True)
    unsharded = (replace(sink, weight=getattr(sink.weight, "orig_param", sink.weight)) for sink in sinks.values())
    return [sink for sink in unsharded if sink.weight.requires_grad]


# -- a training step ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class StepCall:
    """The arguments of Megatron's ``train_step`` that a probe needs."""

    step: int  # number of the step, counted from 0
    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: list[Any]
    optimizer: Any
    config: Any
    forward_backward_func: Callable[..., Any]
    # number of microbatches of the step on this rank
    num_microbatches: int = field(default_factory=get_num_microbatches)


def _note_losses(
    token_losses: list[tuple[torch.Tensor, torch.Tensor]], loss_function: Callable[..., Any], output: torch.Tensor
) -> Any:
    """Call a loss function, and append the loss of each token in ``output`` and whether it counts.

    A loss function that sums the losses of the tokens that count has the derivative 0 at those that do not. If it does
    something else with the output, such as logits, the loss of the microbatch is noted as that of one token.
    """
    losses = output.detach().requires_grad_()
    with torch.enable_grad():
        loss, *extras = loss_function(losses)
        (weight,) = torch.autograd.grad(loss, losses)
    losses, loss = losses.detach(), loss.detach()
    if not torch.isclose((weight.double() * losses).sum(), loss.double(), rtol=1e-3, equal_nan=True):
        losses = (loss / extras[0] if len(extras) > 1 else loss).reshape(1)  # the second of three is a number of tokens
        weight = torch.ones_like(losses)
    token_losses.append((losses, weight != 0))
    return (loss, *extras)


@dataclass(eq=False)
class MegatronStep:
    """A training step of Megatron as :class:`snip_megatron.runtime.host.HostStep`."""

    call: StepCall
    args: argparse.Namespace
    groups: ProbeGroups
    around: Callable[[], AbstractContextManager[None]] = nullcontext  # around passes, entered by :meth:`undisturbed`
    # number of the first microbatch of a pass, 0 being the next that training reads
    first: int = field(default=0, init=False)
    # of each microbatch in the last pass. None if the pass took all
    _sequences: int | None = field(default=None, init=False)
    _restore_random_states: Callable[[], None] = field(default=lambda: None, init=False)
    _pass: range = field(default=range(0), init=False)
    _routing: compat.RepeatedRouting | None = field(default=None, init=False)
    _passes: int = field(default=0, init=False)
    _loss_tokens: list[torch.Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.step, self.microbatches = self.call.step, self.call.num_microbatches
        self._shards = compat.ShardedParameters(self.call.model)

    @functools.cached_property
    def sequences(self) -> int:
        """See :class:`HostStep`. It is 1 if this rank reads data that cannot be cut."""
        size = self.args.micro_batch_size
        return int(size) if size > 1 and compat.divisible(self.call.data_iterator, self.args) else 1

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Restore random states, gradients and Megatron's rerun machine after the passes run inside this context.

        :meth:`run` restores the state of expert routers and the attention logits after every pass.
        """
        call = self.call
        self._restore_random_states, self._passes = compat.random_states(), 0
        try:
            with (
                self.around(),
                compat.rerun_disabled(),
                compat.quiet_schedule(call.config) as self._loss_tokens,
                compat.routing_repeated(call.model) as self._routing,
            ):
                yield
        finally:
            for chunk in call.model:
                chunk.zero_grad_buffer()
            call.optimizer.zero_grad()
            self._restore_random_states()

    def prepare(self, microbatches: int, sequences: int) -> None:
        """Prepare a pass over the first microbatches of the step, and read their data. See :class:`HostStep`."""
        self._sequences = sequences if sequences < self.sequences else None
        self._pass = range(self.first, self.first + microbatches)
        compat.repeated(self.call.data_iterator, self._pass)
        self.rewind()

    def run(self) -> None:
        """Run forward and backward of the prepared pass."""
        compat.gather_parameters(self.call.model)
        self.schedule(self._pass)

    def losses(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Run forwards of the prepared pass. See :class:`HostStep`. The losses are those of the last pipeline stage."""
        token_losses: list[tuple[torch.Tensor, torch.Tensor]] = []

        def forward_step(*arguments: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            output, loss_function = self.call.forward_step_func(*arguments)
            return output, functools.partial(_note_losses, token_losses, loss_function)

        compat.gather_parameters(self.call.model)
        with torch.no_grad():
            if self._routing is not None:
                self._routing.start(first=True)
            self.schedule(self._pass, forward_step, forward_only=True)
        return token_losses

    def rewind(self) -> None:
        """Make the next pass draw the random numbers and choose the experts of the first pass."""
        self._restore_random_states()
        if self._routing is not None:
            self._routing.start(first=self._passes == 0)
        self._passes += 1

    def schedule(
        self,
        microbatches: Sequence[int],
        forward_step_func: Callable[..., Any] | None = None,
        *,
        forward_only: bool = False,
    ) -> None:
        """Run Megatron's schedule, forward and unless ``forward_only`` backward, into zeroed gradients.

        Each microbatch has as many sequences as in the last :meth:`run`.

        Args:
            microbatches: Numbers of microbatches of this data parallel rank in order, 0 being the first of the step. A
                number may occur twice, and may lie beyond the step.
            forward_step_func: Replaces the forward step of the training loop.
        """
        call = self.call
        with ExitStack() as stack:
            for chunk in call.model:
                chunk.zero_grad_buffer()  # before no_sync, which must see fresh buckets
            call.optimizer.zero_grad()  # the step of an FP32 optimizer leaves p.grad an alias of main_grad
            for chunk in call.model:
                stack.enter_context(chunk.no_sync())
            stack.enter_context(compat.routers_restored(call.model))
            stack.enter_context(compat.attention_logits_restored(call.model))
            stack.enter_context(compat.separate_offloading(call.config))
            sequences = self.args.micro_batch_size if self._sequences is None else self._sequences
            stack.enter_context(compat.changed(self.args, micro_batch_size=sequences))
            call.forward_backward_func(
                forward_step_func=forward_step_func or call.forward_step_func,
                data_iterator=compat.repeated(call.data_iterator, microbatches, self._sequences),
                model=call.model,
                num_microbatches=len(microbatches),
                seq_length=self.args.seq_length,
                micro_batch_size=sequences,
                decoder_seq_length=self.args.seq_length,
                forward_only=forward_only,
            )
        self._shards.finish_pass()

    def gradient_scale(self) -> float:
        """Return the factor that turns gradients into those of the mean token loss. Collective.

        The loss scale of fp16 is undone. Masked tokens do not count under ``--calculate-per-token-loss``.
        """
        unscaled = 1.0 / float(self.call.optimizer.get_loss_scale())
        if not self.call.config.calculate_per_token_loss:
            return unscaled / self.groups.dp_size
        device = next(self.call.model[0].parameters()).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        if self.groups.tp_rank == 0:  # tensor parallel ranks count the same tokens
            total += sum(count.to(device) for count in self._loss_tokens)
        dist.all_reduce(total)
        return unscaled / max(float(total), 1.0)  # as Megatron

    def gradient(self, weight: torch.nn.Parameter) -> torch.Tensor:
        """Return ``main_grad`` in FP32. Collective.

        Under sequence parallelism, the gradient of a norm is summed over token shards.
        """
        if self._shards:
            gradient = self._shards.gradient(weight)
        else:
            gradient = weight.main_grad.float()  # type: ignore[attr-defined]
        if getattr(weight, "sequence_parallel", False):
            dist.all_reduce(gradient, group=self.groups.tp)
        return gradient

    def join_gradients(self) -> None:
        """Sum the gradients of the copies of a word embedding on pipeline stages, as a training step does.

        Stages that predict further tokens have a copy, and the stage of an output layer with tied weights.
        """
        for chunk in self.call.model:
            model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
            tied, has_mtp = model.share_embeddings_and_output_weights, getattr(model, "mtp_process", False)
            has_copies = tied or model.config.mtp_num_layers
            group = model.embd_group if model.pre_process or has_mtp or (tied and model.post_process) else None
            weight = model.shared_embedding_or_output_weight() if has_copies and group is not None else None
            if weight is not None and weight.requires_grad and dist.get_world_size(group) > 1:
                dist.all_reduce(weight.main_grad, group=group)

    def update_of(self, weight: torch.nn.Parameter) -> AdamWState | None:
        """Return the optimizer's next update of this rank's elements. See :func:`compat.update_of`.

        Returns None if a rank of the first distributed optimizer has the same elements.
        """
        if compat.optimizer_instance(self.call.model[0]):
            return None
        return compat.update_of(self.call.optimizer, self._shards.of(weight), self.step)

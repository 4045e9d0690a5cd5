"""Computes weight divergence from the probe's gradient and the state of the running optimizer, per parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model

from snip_megatron.megatron import compat
from snip_megatron.optimizers.signs import KeptWords
from snip_megatron.optimizers.updates import Update
from snip_megatron.optimizers.weight_drift import StepScale, linear_drift, sink_drift
from snip_megatron.quantization import derive_seed
from snip_megatron.statistics.gradient_noise import gradient_noise
from snip_megatron.statistics.recorder import LinearRecorder
from snip_megatron.statistics.reduction import PartialTable, ProbeGroups, TableShape
from snip_megatron.statistics.sums import sum_squares
from snip_megatron.statistics.table import SinkRow

UpdateOf = Callable[[torch.nn.Parameter], Update | None]

_EMBEDDING, _NORMS, _FINAL_NORM = "word_embeddings", ("input_layernorm", "pre_mlp_layernorm"), "final_layernorm"
SINKS = (_EMBEDDING, *_NORMS, _FINAL_NORM)
"""Last words of the names of sinks, the parameters beside the linears that gradient errors reach."""

_SIGNS = 1  # stream of random numbers derived from --snip-seed


def sink_rows(config: Any, padded_vocab_size: int) -> tuple[SinkRow, ...]:
    """Return the parameters beside the linears that gradient errors reach: the word embedding and norm weights."""
    hidden, layers = config.hidden_size, config.num_layers
    rows = [SinkRow(f"embedding.{_EMBEDDING}", 0, padded_vocab_size * hidden)]
    for layer in range(layers):
        for i, norm in enumerate(_NORMS):
            rows.append(SinkRow(f"decoder.layers.{layer}.{norm}", 2 * layer + i, hidden))
    return (*rows, SinkRow(f"decoder.{_FINAL_NORM}", 2 * layers, hidden))


class DriftProbe:
    """Evaluates the optimizer with and without gradient errors on this rank's shards of its parameters.

    Args:
        model: Model chunks of this rank, wrapped by DDP.
        shape: Rows of the statistics table.
        groups: Process groups.
        seed: Value of ``--snip-seed``.
        optimizer_sharded: Whether optimizer states are sharded over data parallel ranks.

    Attributes:
        reports: Whether this rank reports the parameters beside the linears. Of ranks with equal optimizer states, only
            data parallel rank 0 does.
    """

    def __init__(
        self,
        model: Sequence[Any],
        shape: TableShape,
        groups: ProbeGroups,
        seed: int,
        *,
        optimizer_sharded: bool,
    ) -> None:
        self._model = list(model)
        self._shape = shape
        self._groups = groups
        self._seed = seed
        self._tp_rank = dist.get_rank(groups.tp)
        self._words = KeptWords()  # four bytes for each row and column of a weight
        self._sharded = optimizer_sharded
        self.reports = optimizer_sharded or groups.dp_rank == 0

    def collect(
        self,
        drift: PartialTable,
        table: PartialTable,
        recorders: Sequence[LinearRecorder],
        optimizer: Any,
        scale: StepScale,
        step: int,
    ) -> None:
        """Add this rank's share to ``drift``. Collective over all tensor and data parallel groups.

        Args:
            drift: Table to add to. The caller reduces it.
            table: The reduced table of the statistics pass.
            recorders: Recorders of this rank's linears, with reduced column norms.
            optimizer: Megatron's optimizer.
            scale: Scales of the gradient.
            step: Number of training steps done.
        """
        update_of = partial(compat.update_of, optimizer, steps=step)
        for recorder in recorders:
            self._add_linear(drift, table, recorder, update_of, scale)
        self._join_tied_gradients()
        for index, weight, replicated, first_row in self.local_sinks():
            self._add_sink(drift, index, weight, replicated, first_row, update_of, scale)

    def _add_linear(
        self,
        drift: PartialTable,
        table: PartialTable,
        recorder: LinearRecorder,
        update_of: UpdateOf,
        scale: StepScale,
    ) -> None:
        handle, groups = recorder.handle, self._groups.of(recorder.handle)
        gradient = self._reduced_gradient(handle.weight, groups)
        total = sum_squares(gradient)
        if handle.expert is None:  # the gradients of an expert's microbatches are not known one by one
            noise = gradient_noise(recorder.each_gw2, total, groups, recorder.microbatches)
            drift.add_linear(handle.name, "gv2", noise * scale.gradient**2)
        if groups.dp_rank == 0:
            drift.add_linear(handle.name, "gw2", total * scale.gradient**2)
        state = update_of(handle.weight)
        if state is None or not (self._sharded or groups.dp_rank == 0):
            return
        name = handle.name
        x2, g2, s2 = (table.linear(name, column) for column in ("x2", "g2", "s2"))
        tokens = None
        if recorder.whole is not None:
            x2, g2, s2, tokens = recorder.whole.tolist()
            g2, s2 = g2 * scale.gradient**2, s2 * scale.gradient**2
        result = linear_drift(
            recorder,
            gradient,
            state,
            scale,
            s2=s2,
            x2=x2,
            g2=g2,
            seed=derive_seed(self._seed, _SIGNS, handle.index),
            tokens=tokens,
            words=self._words,
        )
        drift.add_drift(name, result.drift2)
        drift.add_by_format(name, "wdrift2", result.wdrift2)
        drift.add_by_format(name, "wsigma2", result.wsigma2)
        drift.add_linear(name, "m2", result.m2)
        drift.add_linear(name, "v2", result.v2)

    def _add_sink(
        self,
        drift: PartialTable,
        index: int,
        weight: torch.nn.Parameter,
        replicated: bool,
        first_row: int,
        update_of: UpdateOf,
        scale: StepScale,
    ) -> None:
        gradient = self._reduced_gradient(weight, self._groups)
        state = update_of(weight)
        if state is None or not self.reports or (replicated and self._tp_rank != 0):
            return
        seed = derive_seed(self._seed, _SIGNS, len(self._shape.names) + index)
        w2 = sum_squares(weight.detach().reshape(-1)[state.start : state.end])
        drift2 = sink_drift(gradient, state, scale, seed=seed, first_row=first_row, words=self._words)
        drift.add_sink(index, drift2, w2)

    def _join_tied_gradients(self) -> None:
        """Sum the gradients of a word embedding and of an output layer with the same weight on another pipeline stage,
        in place, as a training step does.
        """
        for chunk in self._model:
            model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
            at_end = model.pre_process or model.post_process
            group = compat.embedding_group(model)
            tied = at_end and model.share_embeddings_and_output_weights and group is not None
            if tied and dist.get_world_size(group) > 1:
                dist.all_reduce(model.shared_embedding_or_output_weight().main_grad, group=group)

    def _reduced_gradient(self, weight: torch.nn.Parameter, groups: ProbeGroups) -> torch.Tensor:
        """Sum the probe's gradient of a parameter over data parallel ranks, in place. The probe discards it later."""
        gradient: torch.Tensor = weight.main_grad  # type: ignore[attr-defined]
        if getattr(weight, "sequence_parallel", False):  # a norm whose ranks process different tokens
            dist.all_reduce(gradient, group=groups.tp)
        if groups.dp_size > 1:
            dist.all_reduce(gradient, group=groups.dp)
        return gradient

    def local_sinks(self) -> list[tuple[int, torch.nn.Parameter, bool, int]]:
        """Return (index, weight, replicated over tensor parallel ranks, global first row) of this rank's sinks.

        See :data:`SINKS`.
        """
        index = {sink.name: i for i, sink in enumerate(self._shape.sinks)}
        found = []
        for chunk in self._model:
            model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
            if model.pre_process:
                weight = model.embedding.word_embeddings.weight
                found.append((index[f"embedding.{_EMBEDDING}"], weight, False, self._tp_rank * weight.shape[0]))
            for layer in model.decoder.layers:
                for norm in _NORMS:
                    weight = getattr(getattr(layer, norm), "weight", None)
                    if weight is not None:
                        found.append((index[f"decoder.layers.{layer.layer_number - 1}.{norm}"], weight, True, 0))
            final = getattr(model.decoder, _FINAL_NORM, None)
            if final is not None:
                found.append((index[f"decoder.{_FINAL_NORM}"], final.weight, True, 0))
        return found

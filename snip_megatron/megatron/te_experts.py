"""Transformer Engine's grouped linears of experts, as Megatron wraps them, with quantised GEMMs.

As in :mod:`snip_megatron.megatron.te_linear`, instances are made by assigning a class, and this module can only be
imported where Transformer Engine can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEColumnParallelGroupedLinear, TERowParallelGroupedLinear
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor

from snip_megatron.layers.context import LinearHandle
from snip_megatron.layers.grouped import GroupedCall, grouped_call, grouped_product, grouped_products
from snip_megatron.layers.padding import pad, unpad
from snip_megatron.layers.swiglu import fused_experts, may_fuse_experts
from snip_megatron.megatron.compat.routing import before_counts
from snip_megatron.megatron.compat.te_recipe import StockState, forward_under
from snip_megatron.megatron.fused_mlp import why_no_swiglu
from snip_megatron.megatron.te_linear import ran_delayed_wgrad
from snip_megatron.numerics.products.group_rows import GroupRows, group_rows


class _GroupedForward(StockState):
    """Runs the GEMMs in the formats of the precision map. With three bf16 GEMMs, Transformer Engine's own code runs.

    Attributes:
        snip_experts: the linears of this rank's experts.
        snip_told: tells DDP that the gradients of their weights are complete; None: autograd does.
    """

    snip_experts: list[LinearHandle]
    snip_told: Callable[[], None] | None = None

    def forward(self: Any, x: Tensor | None, m_splits: Any) -> tuple[Tensor | GroupedCall, list[Tensor] | None]:
        """Return Y and its biases; without x a call for an MLP, which starts with the last expert if ``m_splits``."""
        if self.snip_experts[0].is_stock:
            spans, forward = self.snip_experts[0].state.spans, super().forward  # type: ignore[misc]
            return forward(x, m_splits) if spans is None else spans.run(forward, x, m_splits)  # type: ignore[no-any-return]
        if self.snip_experts[0].runs_recipe:
            weights = [handle.weight for handle in self.snip_experts]
            return forward_under(self, self.snip_experts[0], weights, super().forward, x, m_splits)  # type: ignore[misc,no-any-return]
        self.is_first_microbatch = False  # as after a forward of the stock class
        backwards = m_splits.backwards if isinstance(m_splits, GroupRows) else x is None and m_splits
        order = slice(None, None, -1 if backwards else 1)
        handles = self.snip_experts[order]
        weights = [self._parameters[handle.parameter] for handle in handles]
        if x is None:
            return grouped_call(handles, weights, self.snip_told), None
        y = grouped_product(handles, weights, x, m_splits, self.snip_told)
        biases = [getattr(self, f"bias{e}") for e in range(self.num_gemms)][order] if self.use_bias else []
        if self.apply_bias:
            y = y + torch.cat([bias.expand(count, -1) for bias, count in zip(biases, m_splits, strict=True)])
        return y, biases if self.te_return_bias else None

    def backward_dw(self: Any) -> None:
        """Tell DDP that the wgrads of the earliest backward have run (``--delay-wgrad-compute``)."""
        if not ran_delayed_wgrad(self, self.snip_experts[0]):
            super().backward_dw()  # type: ignore[misc]


class SnipTEColumnParallelGroupedLinear(_GroupedForward, TEColumnParallelGroupedLinear):  # type: ignore[misc]
    """The first linear of all experts, whose GEMMs follow the precision map."""


class SnipTERowParallelGroupedLinear(_GroupedForward, TERowParallelGroupedLinear):  # type: ignore[misc]
    """The second linear of all experts, whose GEMMs follow the precision map."""


class SnipTEGroupedMLP(TEGroupedMLP):  # type: ignore[misc]
    """Experts that pad the rows of their linears once, where the grouped products need padding.

    With ``snip_fuses``, SwiGLU times the probabilities may be computed with the quantisation of its result.
    """

    snip_fuses: bool

    def snip_prepare(self) -> None:
        """Make what the next forward needs beside its rows, for whose numbers the host waits."""
        if not self.linear_fc1.snip_experts[0].context.fsdp_sharded:  # weights that are not there yet
            self.__dict__["snip_prepared"] = self._snip_prepared()

    def _snip_prepared(self) -> tuple[bool, bool, list[GroupedCall]]:
        """Return whether rows are padded, whether the last expert comes first, and the calls of linears to fuse."""
        fc1, fc2 = (linear.snip_experts[0] for linear in (self.linear_fc1, self.linear_fc2))
        if not (_pads(fc1) or _pads(fc2)):
            return False, False, []
        last = self.linear_fc1.snip_experts[-1]
        # Transformer Engine's own code takes rows from the first expert on.
        backwards = last.weight.data_ptr() < fc1.weight.data_ptr() and not (fc1.is_stock or fc2.is_stock)
        # The modules are called, because DDP's hooks on them wait for their weights.
        linears = (self.linear_fc1, self.linear_fc2) if self.snip_fuses and may_fuse_experts(fc1, fc2) else ()
        return True, backwards, [linear(None, backwards)[0] for linear in linears]

    def forward(
        self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor, *buffers: Any, **named: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Run Megatron's experts, on padded rows unless both linears run Transformer Engine's own code."""
        pads, backwards, calls = self.__dict__.pop("snip_prepared", None) or self._snip_prepared()
        if not pads:
            return super().forward(hidden, tokens_per_expert, probs, *buffers, **named)  # type: ignore[no-any-return]
        rows = group_rows(tuple(tokens_per_expert.tolist()), hidden.device, backwards=backwards)
        if calls:
            return fused_experts(hidden, probs, rows, *calls), None
        output, bias = super().forward(pad(hidden, rows), rows, pad(probs, rows), *buffers, **named)
        return unpad(output, rows), bias


def pad_rows(model_chunks: Sequence[torch.nn.Module], *, fuses: bool) -> None:
    """Let the MLPs of experts whose linears are converted pad their rows, and with ``fuses`` fuse SwiGLU."""
    for layer in (module for chunk in model_chunks for module in chunk.modules()):
        mlp: Any = getattr(layer, "experts", None)
        if type(mlp) is TEGroupedMLP and hasattr(mlp.linear_fc1, "snip_experts"):
            mlp.__class__, mlp.snip_fuses = SnipTEGroupedMLP, fuses and _is_weighted_swiglu(mlp)
            before_counts(layer.token_dispatcher, mlp.snip_prepare)
            for handle in (*mlp.linear_fc1.snip_experts, *mlp.linear_fc2.snip_experts):
                handle.state.beside_swiglu = mlp.snip_fuses


def _is_weighted_swiglu(mlp: Any) -> bool:
    """Return whether nothing but SwiGLU times the probabilities runs between the linears."""
    config = mlp.config
    hindered = why_no_swiglu(config) is not None or config.moe_apply_probs_on_input
    offloads = mlp.activation_recompute or mlp.offload_expert_fc1 or mlp.offload_moe_act
    return not (hindered or offloads or config.moe_mlp_glu_interleave_size is not None)


def _pads(handle: LinearHandle) -> bool:
    """Return whether the products of the next forward need padding. Every quantiser of Transformer Engine does."""
    return not handle.is_stock and (handle.runs_recipe or grouped_products(handle).pads)


CLASSES: dict[type, tuple[type, str]] = {
    TEColumnParallelGroupedLinear: (SnipTEColumnParallelGroupedLinear, "column"),
    TERowParallelGroupedLinear: (SnipTERowParallelGroupedLinear, "row"),
}
"""Class of a built linear → the class that it gets, and how its weights are sharded."""

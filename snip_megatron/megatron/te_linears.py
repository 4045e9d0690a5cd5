"""Transformer Engine's linears and grouped linears, as Megatron wraps them, with quantised GEMMs.

As in :mod:`snip_megatron.megatron.linears`, instances are made by assigning a class. This module can only be imported
where Transformer Engine can.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelGroupedLinear,
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TELinear,
    TERowParallelGroupedLinear,
    TERowParallelLinear,
)
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.heterogeneous.linear_replacements import TELayerNormColumnParallelLinearGathered
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor

from snip_megatron.layers.context import LinearHandle
from snip_megatron.layers.grouped import GroupedCall, grouped_call, grouped_product, grouped_products, pad, unpad
from snip_megatron.layers.swiglu import fused_experts, may_fuse_experts, takes_device_rows
from snip_megatron.megatron.compat.routing import prepare_before_counts
from snip_megatron.megatron.compat.transformer_engine import StockState, forward_under, normalized
from snip_megatron.megatron.linears import may_reduce_scatter, product, why_no_swiglu
from snip_megatron.numerics.products.grouped import DeviceRows, GroupRows, group_rows
from snip_megatron.numerics.products.grouped_hopper import stacked


class _Quantized(StockState):
    snip: LinearHandle  # the linear, or that of the first expert

    def backward_dw(self: Any) -> None:
        """Run the wgrad of the earliest backward that delayed it (``--delay-wgrad-compute``), and report it to DDP."""
        if not self.snip.state.delayed:  # that backward was Transformer Engine's own
            super().backward_dw()  # type: ignore[misc]
            return
        self.snip.state.delayed.popleft()()
        self._trigger_wgrad_accumulation_and_reduce_hooks()


class _QuantizedForward(_Quantized):
    """Runs the GEMMs in the formats of the precision map. With three bf16 GEMMs, Transformer Engine's own code runs.

    Attributes of Transformer Engine that are read here:
        parallel_mode: "column" or "row". None if the linear exchanges nothing.
        tp_size: Number of ranks of ``tp_group``, over which the linear exchanges. It is 1 if the linear exchanges
            nothing.
        sequence_parallel: Whether tokens are sharded and ``tp_size`` is not 1.
        apply_bias: Whether the linear adds its bias itself.
    """

    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.snip.is_stock:
            return super().forward(x)  # type: ignore[misc,no-any-return]
        if self.snip.runs_recipe:
            return forward_under(self, self.snip, [self.weight], super().forward, x)  # type: ignore[misc,no-any-return]
        self.is_first_microbatch = False  # as after a forward of the stock class
        returned = self.bias if self.te_return_bias else None
        bias = self.bias if self.apply_bias else None
        if self.parallel_mode == "row" and self.tp_size > 1:
            if self.sequence_parallel and may_reduce_scatter(self.snip):
                y = product(self.snip, x, self.weight, tp_group=self.tp_group, reduce_scatter=True)
            else:
                shards = self.sequence_parallel
                reduce = (
                    reduce_scatter_to_sequence_parallel_region if shards else reduce_from_tensor_model_parallel_region
                )
                y = reduce(product(self.snip, x, self.weight), group=self.tp_group)
            return y if bias is None else y + bias, returned
        exchange: dict[str, Any] = {}
        if self.parallel_mode == "column" and self.tp_size > 1:
            shards = self.sequence_parallel
            exchange = {"sequence_parallel": shards, "allreduce_dgrad": not shards, "tp_group": self.tp_group}
        return product(self.snip, self._input(x), self.weight, bias, **exchange), returned

    def _input(self, x: torch.Tensor) -> torch.Tensor:
        return x


class SnipTELinear(_QuantizedForward, TELinear):  # type: ignore[misc]
    """A linear that is replicated on tensor parallel ranks, or whose input and output other modules exchange."""


class SnipTEColumnParallelLinear(_QuantizedForward, TEColumnParallelLinear):  # type: ignore[misc]
    """A column-parallel linear whose GEMMs follow the precision map."""


class SnipTERowParallelLinear(_QuantizedForward, TERowParallelLinear):  # type: ignore[misc]
    """A row-parallel linear whose GEMMs follow the precision map."""


class SnipTELayerNormColumnParallelLinear(_QuantizedForward, TELayerNormColumnParallelLinear):  # type: ignore[misc]
    """A norm and a column-parallel linear whose GEMMs follow the precision map."""

    def _input(self, x: torch.Tensor) -> torch.Tensor:
        return normalized(self, x)


class SnipTELayerNormColumnParallelLinearGathered(
    TELayerNormColumnParallelLinearGathered,  # type: ignore[misc]
    SnipTELayerNormColumnParallelLinear,
):
    """A norm and a linear in place of a whole attention or MLP, in heterogeneous layers."""


class _GroupedForward(_Quantized):
    """Runs the GEMMs in the formats of the precision map. With three bf16 GEMMs, Transformer Engine's own code runs."""

    snip_experts: list[LinearHandle]  # the linears of this rank's experts
    # callback that reports complete wgrads to DDP. None if autograd reports them
    on_wgrad_complete: Callable[[], None] | None = None

    @property
    def snip(self) -> LinearHandle:  # type: ignore[override]
        return self.snip_experts[0]

    def forward(self: Any, x: Tensor | None, m_splits: Any) -> tuple[Tensor | GroupedCall, list[Tensor] | None]:
        """Return Y and its biases.

        If ``x`` is None, a call for an MLP is returned in place of Y. It starts with the last expert if ``m_splits``.
        """
        if self.snip.is_stock:
            spans, forward = self.snip.state.spans, super().forward  # type: ignore[misc]
            return forward(x, m_splits) if spans is None else spans.run(forward, x, m_splits)  # type: ignore[no-any-return]
        if self.snip.runs_recipe:
            weights = [handle.weight for handle in self.snip_experts]
            return forward_under(self, self.snip, weights, super().forward, x, m_splits)  # type: ignore[misc,no-any-return]
        self.is_first_microbatch = False  # as after a forward of the stock class
        backwards = m_splits.backwards if isinstance(m_splits, GroupRows) else x is None and m_splits
        order = slice(None, None, -1 if backwards else 1)
        handles = self.snip_experts[order]
        weights = [self._parameters[handle.parameter] for handle in handles]
        if x is None:
            return grouped_call(handles, weights, self.on_wgrad_complete), None
        y = grouped_product(handles, weights, x, m_splits, self.on_wgrad_complete)
        biases = [getattr(self, f"bias{e}") for e in range(self.num_gemms)][order] if self.use_bias else []
        if self.apply_bias:
            y = y + torch.cat([bias.expand(count, -1) for bias, count in zip(biases, m_splits, strict=True)])
        return y, biases if self.te_return_bias else None


class SnipTEColumnParallelGroupedLinear(_GroupedForward, TEColumnParallelGroupedLinear):  # type: ignore[misc]
    """The first linear of all experts, whose GEMMs follow the precision map."""


class SnipTERowParallelGroupedLinear(_GroupedForward, TERowParallelGroupedLinear):  # type: ignore[misc]
    """The second linear of all experts, whose GEMMs follow the precision map."""


class SnipTEGroupedMLP(TEGroupedMLP):  # type: ignore[misc]
    """Experts that pad the rows of both linears once if the grouped products need padding.

    If ``snip_fused_swiglu``, SwiGLU times the probabilities may be fused with the quantisation of the product. If
    ``snip_grouped_tensors`` (``--moe-use-grouped-tensor``), Transformer Engine multiplies grouped tensors wherever both
    linears run its own code.
    """

    snip_fused_swiglu: bool
    snip_grouped_tensors: bool

    def snip_prepare(self) -> bool:
        """Prepare the next forward as far as possible without the numbers of rows.

        Returns whether it takes these numbers on the device, so that the host need not wait for them.
        """
        if self.linear_fc1.snip.context.fsdp_sharded:  # the weights are not there yet
            return False
        self.__dict__["snip_prepared"] = *_, on_device = self._snip_prepared()
        return on_device

    def _snip_prepared(self) -> tuple[bool, bool, list[GroupedCall], bool]:
        """Return whether rows are padded, whether the last expert comes first, the calls of fused linears, and whether
        these take the numbers of rows on the device.
        """
        fc1, fc2 = self.linear_fc1.snip, self.linear_fc2.snip
        quantized = [fc for fc in (fc1, fc2) if not fc.is_stock]
        if not any(fc.runs_recipe or grouped_products(fc).pads for fc in quantized):
            return False, False, [], False  # all quantisers of Transformer Engine need padding
        last = self.linear_fc1.snip_experts[-1]
        # Transformer Engine's own code takes rows from the first expert on.
        backwards = last.weight.data_ptr() < fc1.weight.data_ptr() and not (fc1.is_stock or fc2.is_stock)
        # The modules are called, because hooks of DDP wait for their weights.
        linears = (self.linear_fc1, self.linear_fc2) if self.snip_fused_swiglu and may_fuse_experts(fc1, fc2) else ()
        calls = [linear(None, backwards)[0] for linear in linears]
        return True, backwards, calls, bool(calls) and takes_device_rows(*calls)

    def snip_why_eager(self) -> str | None:
        """Return why no CUDA graph can hold a forward under the map in force. None if one can.

        In a graph, everything between the router and the sum over experts is a function of tensors on the device.
        """
        linears = self.linear_fc1, self.linear_fc2
        fc1, fc2 = (linear.snip for linear in linears)
        if fc1.is_stock or fc2.is_stock:
            return f"{fc1.name} is in bf16"
        for linear in linears:
            handle, weights = linear.snip, [each.weight for each in linear.snip_experts]
            if not grouped_products(handle).takes_device_rows(handle.formats):
                formats = ", ".join(each.value for each in handle.formats)
                return f"{handle.name} in {formats} runs expert by expert"
            if linear.on_wgrad_complete is None:
                return f"autograd adds up the gradients of {handle.name}"
            if stacked(weights[::-1]) is None and stacked(weights) is None:
                return f"the weights of {handle.name} do not follow each other in memory"
        fused = self.snip_fused_swiglu and may_fuse_experts(fc1, fc2)
        return None if fused else f"SwiGLU after {fc1.name} is not fused"

    def forward(
        self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor, *buffers: Any, **named: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Run Megatron's experts, on padded rows unless both linears run Transformer Engine's own code."""
        padded, backwards, calls, on_device = self.__dict__.pop("snip_prepared", None) or self._snip_prepared()
        if self.snip_grouped_tensors:  # Transformer Engine's own code takes the numbers of rows on the device
            linears = self.linear_fc1, self.linear_fc2
            self._use_grouped_tensor = all(linear.snip.is_stock for linear in linears)
            for linear in linears:
                linear.use_grouped_tensor = self._use_grouped_tensor
        if not padded:
            return super().forward(hidden, tokens_per_expert, probs, *buffers, **named)  # type: ignore[no-any-return]
        if on_device and tokens_per_expert.device == hidden.device:
            unread = DeviceRows(tokens_per_expert, len(hidden), backwards=backwards)
            return fused_experts(hidden, probs, unread, *calls), None
        rows = group_rows(tuple(tokens_per_expert.tolist()), hidden.device, backwards=backwards)
        if calls:
            return fused_experts(hidden, probs, rows, *calls), None
        output, bias = super().forward(pad(hidden, rows), rows, pad(probs, rows), *buffers, **named)
        return unpad(output, rows), bias


def convert_expert_mlps(model_chunks: Sequence[torch.nn.Module], *, fuse_swiglu: bool) -> None:
    """Convert the MLPs of experts whose linears are converted: they pad rows, and fuse SwiGLU if ``fuse_swiglu``."""
    for layer in (module for chunk in model_chunks for module in chunk.modules()):
        mlp: Any = getattr(layer, "experts", None)
        if type(mlp) is TEGroupedMLP and hasattr(mlp.linear_fc1, "snip_experts"):
            mlp.__class__, mlp.snip_fused_swiglu = SnipTEGroupedMLP, fuse_swiglu and _is_weighted_swiglu(mlp)
            mlp.snip_grouped_tensors = getattr(mlp.config, "moe_use_grouped_tensor", False)  # since Megatron 0.20
            prepare_before_counts(layer.token_dispatcher, mlp.snip_prepare)
            for handle in (*mlp.linear_fc1.snip_experts, *mlp.linear_fc2.snip_experts):
                handle.state.beside_swiglu = mlp.snip_fused_swiglu


def _is_weighted_swiglu(mlp: Any) -> bool:
    """Return whether only SwiGLU times the probabilities runs between the linears."""
    config = mlp.config
    other = why_no_swiglu(config) is not None or config.moe_apply_probs_on_input
    offloads = mlp.activation_recompute or mlp.offload_expert_fc1 or mlp.offload_moe_act
    return not (other or offloads or config.moe_mlp_glu_interleave_size is not None)


CLASSES: dict[type, type] = {
    TELinear: SnipTELinear,
    TEColumnParallelLinear: SnipTEColumnParallelLinear,
    TERowParallelLinear: SnipTERowParallelLinear,
    TELayerNormColumnParallelLinear: SnipTELayerNormColumnParallelLinear,
    TELayerNormColumnParallelLinearGathered: SnipTELayerNormColumnParallelLinearGathered,
    TEColumnParallelGroupedLinear: SnipTEColumnParallelGroupedLinear,
    TERowParallelGroupedLinear: SnipTERowParallelGroupedLinear,
}
"""Class of a built linear → the class after conversion."""

"""Restores the state of expert routers after a probe, and routes tokens equally in all passes of a probe.

A forward counts tokens per expert (expert bias, global auxiliary loss, quantiles) for the end of the training step, and
records auxiliary losses in a global tracker. A probe must leave this state unchanged.

Noise in the activations could route some tokens to other experts than in the statistics pass. The loss would then jump
instead of following its derivative, and the rows of an expert's GEMM would be other tokens. All passes of a probe
therefore use the routing of its first pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import Router, TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from snip_megatron.megatron.compat.versions import changed, check_names, check_signature

_SCALE = "main_loss_backward_scale"
_DROP = "apply_router_token_dropping"
_BALANCED = ("sinkhorn", "qb_dual_update")
"""Functions that choose experts by all tokens of a forward. The router looks them up by their global names."""
check_names(MoEAuxLossAutoScaler, _SCALE)
check_names(TopKRouter.routing, _DROP, "router_replay")
check_names(router_module, *_BALANCED)
for _method in (MoEAlltoAllTokenDispatcher.dispatch_postprocess, MoEAlltoAllTokenDispatcher.combine_preprocess):
    check_names(_method, "num_local_experts", "num_global_tokens_per_local_expert", "sort_chunks_by_idxs")

check_signature(MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize, "self", "point", "tokens_per_expert")
check_names(MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize, "cuda_dtoh_point", "cuda_sync_point")

TopK = tuple[torch.Tensor, torch.Tensor]


def skip_sorting(model: Sequence[torch.nn.Module]) -> None:
    """Skip Megatron's second sorting of rows by expert on a rank that has all experts.

    There the first permutation has sorted the rows already. The second one and its inverse move no row, but take four
    passes over the rows of a layer.
    """
    for module in (module for chunk in model for module in chunk.modules()):
        dispatcher: Any = getattr(module, "token_dispatcher", None)
        if type(dispatcher) is not MoEAlltoAllTokenDispatcher or dispatcher.drop_and_pad:
            continue
        if dispatcher.ep_size == dispatcher.tp_size == 1:
            dispatcher.num_local_experts, dispatcher.num_global_tokens_per_local_expert = 1, None


def prepare_before_counts(dispatcher: Any, prepare: Callable[[], bool]) -> None:
    """Call ``prepare`` before a dispatcher waits for the experts' numbers of rows.

    If it returns True, experts take these numbers on the device. On a rank that has all experts and drops no token, the
    dispatcher then does not wait: the sum of the numbers is known.
    """
    if why_host_counts(dispatcher) is None:
        copied, stay = dispatcher._maybe_dtoh_and_synchronize, False

        def counts(point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
            nonlocal stay
            if point == dispatcher.cuda_dtoh_point:
                stay = prepare()
            return tokens_per_expert if stay else copied(point, tokens_per_expert)

        dispatcher._maybe_dtoh_and_synchronize = counts
        return
    stock = dispatcher.dispatch_postprocess

    def dispatch_postprocess(*arguments: Any) -> Any:
        prepare()
        return stock(*arguments)

    dispatcher.dispatch_postprocess = dispatch_postprocess


def why_host_counts(dispatcher: Any) -> str | None:
    """Return why the numbers of rows of experts come to the host. None if they may stay on the device."""
    if type(dispatcher) is not MoEAlltoAllTokenDispatcher:
        return "the dispatcher of tokens is not alltoall"
    if not dispatcher.ep_size == dispatcher.tp_size == 1:
        return "several ranks exchange their rows"
    config = dispatcher.config
    if config.moe_expert_capacity_factor is not None or config.moe_router_padding_for_quantization:
        return "the number of all rows is not constant"
    return None if dispatcher.num_local_experts == 1 else "rows are sorted twice"  # skip_sorting sets 1


def _routers(model: Sequence[torch.nn.Module]) -> list[Any]:
    return [module for chunk in model for module in chunk.modules() if isinstance(module, Router)]


# -- state of the routers --------------------------------------------------------------------------------------
@contextlib.contextmanager
def routers_restored(model: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Restore the state of routers and auxiliary losses at the end of this context.

    It consists of the routers' buffers, the tracker and the scale of auxiliary losses, and the losses of multi-token
    prediction that Megatron will print.
    """
    routers, mtp_losses = _routers(model), MTPLossLoggingHelper.tracker
    buffers = [(buffer, buffer.detach().clone()) for router in routers for buffer in router.buffers(recurse=False)]
    tracked = {name: values.clone() for name, values in _tracked().items()}
    scale = getattr(MoEAuxLossAutoScaler, _SCALE)
    factor = None if scale is None else scale.clone()
    MTPLossLoggingHelper.tracker = {}
    try:
        yield
    finally:
        MTPLossLoggingHelper.tracker = mtp_losses
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
            for name, values in _tracked().items():
                values.copy_(tracked[name]) if name in tracked else values.zero_()
            if scale is not None:  # CUDA graphs read it at its address
                scale.copy_(factor)
        setattr(MoEAuxLossAutoScaler, _SCALE, scale)


def _tracked() -> dict[str, torch.Tensor]:
    """Return Megatron's tracker of auxiliary losses as name → values per layer."""
    return {name: entry.values for name, entry in get_moe_metrics_tracker().metrics.items()}


# -- equal routing in all passes -------------------------------------------------------------------------------
class RepeatedRouting:
    """Records the experts that the first pass chooses. Later passes use these experts with their own probabilities."""

    def __init__(self) -> None:
        self._routes: list[_Route] = []
        self.latest: _Route | None = None
        self.recording = True

    def add(self) -> _Route:
        """Add a router. Returns the object for its ``router_replay``."""
        self._routes.append(_Route(self))
        return self._routes[-1]

    def start(self, *, first: bool) -> None:
        """Begin a pass over the same microbatches. The routing is recorded if ``first``, else replayed.

        A pass without gradients keeps the record of those with gradients.
        """
        self.recording = first
        for route in self._routes:
            route.calls.clear()
            if first:
                keep = {} if torch.is_grad_enabled() else {key: each for key, each in route.recorded.items() if key[1]}
                route.recorded = keep


class _Route:
    """Replaces a router's ``router_replay``.

    Activation recomputation runs the forward of a microbatch twice, first without gradients. On every schedule, the
    forwards of each kind run in the order of the microbatches. They are therefore counted separately.
    """

    def __init__(self, routing: RepeatedRouting) -> None:
        self._routing = routing
        self.recorded: dict[tuple[str, bool], list[torch.Tensor]] = {}
        self.calls: dict[tuple[str, bool], int] = {}

    def repeated(self, name: str, value: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return ``value()`` in the first pass. In later passes, return the result of the same call in the first."""
        key = (name, torch.is_grad_enabled())
        call = self.calls[key] = self.calls.get(key, -1) + 1
        if self._routing.recording:
            self.recorded.setdefault(key, []).append(value().detach())
        return self.recorded[key][call]

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., TopK] | None = None,
    ) -> TopK:
        """Return values and indices [tokens, k] of the chosen experts. Megatron's routing function calls this."""
        assert default_compute_topk is not None
        self._routing.latest = self
        indices = self.repeated(
            "experts", lambda: default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)[1]
        )
        return scores.gather(1, indices), indices


@contextlib.contextmanager
def routing_repeated(model: Sequence[torch.nn.Module]) -> Iterator[RepeatedRouting]:
    """Route tokens equally in all passes inside this context. Each pass begins with :meth:`RepeatedRouting.start`."""
    routing, routers = RepeatedRouting(), _routers(model)
    drop = getattr(router_module, _DROP)

    def drop_equally(probs: torch.Tensor, routing_map: torch.Tensor, *args: Any, **kwargs: Any) -> TopK:
        """Drop the same tokens beyond an expert's capacity in all passes."""
        route = routing.latest
        assert route is not None
        remaining, mask = drop(probs, routing_map, *args, **kwargs)
        first_mask = route.repeated("mask", lambda: mask)
        return (remaining, mask) if torch.equal(first_mask, mask) else (probs * first_mask, first_mask)

    balanced = {name: getattr(router_module, name) for name in _BALANCED}
    common = routing.add()  # these functions do not know which router calls, but calls always have the same order

    def sinkhorn_equally(*args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the assignment of the first pass, of which the router takes the largest."""
        return common.repeated("sinkhorn", lambda: balanced["sinkhorn"](*args, **kwargs))

    def quantiles_equally(*args: Any, **kwargs: Any) -> TopK:
        """Return the experts of the first pass, and this pass's own update of the quantiles."""
        indices, update = balanced["qb_dual_update"](*args, **kwargs)
        return common.repeated("quantiles", lambda: indices), update

    with contextlib.ExitStack() as stack:
        for router in routers:
            stack.enter_context(changed(router, router_replay=routing.add()))
            stack.enter_context(changed(router.config, moe_router_fusion=False))  # a fused router replays nothing
        if routers:
            replaced = {_DROP: drop_equally, "sinkhorn": sinkhorn_equally, "qb_dual_update": quantiles_equally}
            stack.enter_context(changed(router_module, **replaced))
        yield routing

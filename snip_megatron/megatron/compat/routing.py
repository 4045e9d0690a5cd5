"""Routers of mixtures of experts: what a forward leaves behind in them, and passes that all route alike.

A forward adds up tokens per expert (expert bias, global auxiliary loss, quantiles), which the end of a training step
reads, and records auxiliary losses in a global tracker. A pass that is no training must leave all that as it was.

Noise would send some tokens to other experts than the statistics pass did: a jump, not the derivative that is wanted,
and the rows of an expert would be other tokens. So the passes of a probe route as its first one does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import Router, TopKRouter

from snip_megatron.errors import SnipError

_SCALE = "main_loss_backward_scale"
_DROP = "apply_router_token_dropping"
if not hasattr(MoEAuxLossAutoScaler, _SCALE):
    raise SnipError(f"Megatron's MoEAuxLossAutoScaler has no {_SCALE}: probes could not restore it")
if _DROP not in TopKRouter.routing.__code__.co_names:
    raise SnipError(f"Megatron's router no longer looks {_DROP} up by its global name: probes cannot repeat a routing")

TopK = tuple[torch.Tensor, torch.Tensor]


def routing_repeats() -> bool:
    """Whether this Megatron's router lets another choose the experts of its tokens."""
    return "router_replay" in TopKRouter.routing.__code__.co_names


def _routers(model: Sequence[torch.nn.Module]) -> list[Any]:
    return [module for chunk in model for module in chunk.modules() if isinstance(module, Router)]


# -- what a forward leaves behind ------------------------------------------------------------------------------
@contextlib.contextmanager
def routers_kept(model: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Forwards inside leave the routers' buffers, the tracker and the scale of auxiliary losses as they were."""
    routers = _routers(model)
    if not routers:
        yield
        return
    buffers = [(buffer, buffer.detach().clone()) for router in routers for buffer in router.buffers(recurse=False)]
    tracked = {name: values.clone() for name, values in _tracked().items()}
    scale = getattr(MoEAuxLossAutoScaler, _SCALE)
    scale = None if scale is None else scale.clone()
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
            for name, values in _tracked().items():
                values.copy_(tracked[name]) if name in tracked else values.zero_()
        setattr(MoEAuxLossAutoScaler, _SCALE, scale)


def _tracked() -> dict[str, torch.Tensor]:
    """Name → values of the layers, of the tracker that Megatron reports and clears at the end of a step."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # until 0.18: a dict of dicts
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        return {name: entry["values"] for name, entry in get_moe_layer_wise_logging_tracker().items()}
    return {name: entry.values for name, entry in get_moe_metrics_tracker().metrics.items()}


# -- passes that route alike -----------------------------------------------------------------------------------
class RepeatedRouting:
    """Notes where the first pass sends its tokens; later passes send them there, with weights of their own."""

    def __init__(self) -> None:
        self._routes: list[_Route] = []
        self.latest: _Route | None = None

    def add(self) -> _Route:
        """One more router."""
        self._routes.append(_Route(self))
        return self._routes[-1]

    def start(self, *, first: bool) -> None:
        """Begin a pass over the same microbatches."""
        for route in self._routes:
            route.start(noting=first)


class _Route:
    """Stands in a router's ``router_replay``.

    Recompute runs a microbatch's forward twice, first without gradients; each kind comes in the order of the
    microbatches on every schedule.
    """

    def __init__(self, owner: RepeatedRouting) -> None:
        self._owner = owner
        self._noting = True
        self._noted: dict[tuple[str, bool], list[torch.Tensor]] = {}
        self._at: dict[tuple[str, bool], int] = {}

    def start(self, *, noting: bool) -> None:
        self._noting = noting
        self._at.clear()
        if noting:
            self._noted.clear()

    def repeated(self, what: str, value: Callable[[], torch.Tensor]) -> torch.Tensor:
        """``value()`` of the first pass at the same place."""
        key = (what, torch.is_grad_enabled())
        at = self._at[key] = self._at.get(key, -1) + 1
        if self._noting:
            self._noted.setdefault(key, []).append(value().detach())
        return self._noted[key][at]

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., TopK] | None = None,
    ) -> TopK:
        """Values and indices [tokens, k] as Megatron's top-k gives them; asked by its routing function."""
        assert default_compute_topk is not None
        self._owner.latest = self
        if self._noting:
            values, indices = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            self.repeated("experts", lambda: indices)
            return values, indices
        indices = self.repeated("experts", lambda: scores)
        return scores.gather(1, indices), indices


@contextlib.contextmanager
def routing_repeated(model: Sequence[torch.nn.Module]) -> Iterator[RepeatedRouting]:
    """Passes inside route as told by :meth:`RepeatedRouting.start`. Raises SnipError where a router cannot."""
    routing = RepeatedRouting()
    routers = _routers(model)
    if routers and not routing_repeats():
        raise SnipError("this Megatron's routers cannot repeat a routing; mixtures of experts need megatron-core 0.19")
    before = [(router, router.router_replay) for router in routers]
    drop = getattr(router_module, _DROP)

    def drop_alike(probs: torch.Tensor, routing_map: torch.Tensor, *args: Any, **kwargs: Any) -> TopK:
        """Tokens beyond an expert's capacity: the same in all passes."""
        route = routing.latest
        assert route is not None
        kept, final = drop(probs, routing_map, *args, **kwargs)
        again = route.repeated("kept", lambda: final)
        return (kept, final) if torch.equal(again, final) else (probs * again, again)

    try:
        for router in routers:
            router.router_replay = routing.add()
        if routers:
            setattr(router_module, _DROP, drop_alike)
        yield routing
    finally:
        setattr(router_module, _DROP, drop)
        for router, replay in before:
            router.router_replay = replay

"""Real routers of Megatron: passes that are no training leave nothing in them, and route as the first one did."""

from unittest import mock

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import TransformerConfig

from snip_megatron.megatron.compat.routing import _tracked, routers_restored, routing_repeated, skip_sorting

pytestmark = pytest.mark.usefixtures("model_parallel_of_one")

EXPERTS, HIDDEN, TOKENS, CAPACITY = 4, 16, 24, 9  # of 12 tokens an expert on average


COUNTED = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.01, 0.01],
    "moe_z_loss_coeff": 0.001,
    "moe_expert_capacity_factor": 0.75,
}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> list[torch.nn.Module]:
    """A chunk of two routers with everything that they count."""
    return routers_of(monkeypatch, **COUNTED)


def routers_of(monkeypatch: pytest.MonkeyPatch, **settings: object) -> list[torch.nn.Module]:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    sizes = {"num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": 2, "num_moe_experts": EXPERTS}
    config = TransformerConfig(
        **sizes, moe_router_topk=2, moe_ffn_hidden_size=32, use_cpu_initialization=True, **settings
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    torch.manual_seed(3)
    routers = [TopKRouter(config, groups) for _ in range(2)]
    for number, router in enumerate(routers):
        router.set_layer_number(number + 1)
        with torch.no_grad():
            router.weight.normal_()
    return [torch.nn.ModuleList(routers)]


def forward(model: list[torch.nn.Module], *inputs: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [router(x) for x in inputs for router in model[0]]  # type: ignore[attr-defined]


def tokens(seed: int) -> torch.Tensor:
    return torch.randn(TOKENS // 2, 2, HIDDEN, generator=torch.Generator().manual_seed(seed))


def test_nothing_is_left_behind(model: list[torch.nn.Module]) -> None:
    forward(model, tokens(0))
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(0.25))
    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    buffers = {name: value.clone() for name, value in model[0].named_buffers()}
    tracked = {name: value.clone() for name, value in _tracked().items()}
    assert {name.split(".")[1] for name in buffers} >= {"local_tokens_per_expert", "global_tokens_per_expert"}
    assert all(float(values.abs().sum()) > 0 for values in tracked.values())
    assert len(tracked) == 3
    with routers_restored(model):
        forward(model, tokens(1))
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(0.5))
        assert any(not torch.equal(value, buffers[name]) for name, value in model[0].named_buffers())
        assert any(not torch.equal(value, tracked[name]) for name, value in _tracked().items())
    assert all(torch.equal(value, buffers[name]) for name, value in model[0].named_buffers())
    assert all(torch.equal(value, tracked[name]) for name, value in _tracked().items())
    assert MoEAuxLossAutoScaler.main_loss_backward_scale is scale, "CUDA graphs read it at its address"
    assert float(scale) == 0.25


def test_losses_of_multi_token_prediction_are_those_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.current_device", lambda: "cpu")
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})
    unit = torch.ones(())
    MTPLossLoggingHelper.save_metrics_to_tracker(2 * unit, unit, unit, 0, 1)
    with routers_restored([]):
        MTPLossLoggingHelper.save_metrics_to_tracker(3 * unit, unit, unit, 0, 1)
    assert float(MTPLossLoggingHelper.tracker["loss_values"]) == 2


@pytest.mark.parametrize(
    "settings",
    [COUNTED, {"moe_router_load_balancing_type": "sinkhorn"}, {"moe_router_load_balancing_type": "quantile_balancing"}],
)
def test_noise_sends_no_token_to_another_expert(monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]) -> None:
    model = routers_of(monkeypatch, **settings)
    first, second = tokens(1), tokens(2)
    noise = 0.5 * tokens(3)
    with routing_repeated(model) as routing:
        routing.start(first=True)
        noted = forward(model, first, second)
        routing.start(first=False)
        again = forward(model, first + noise, second + noise)
    free = forward(model, first + noise, second + noise)
    for (probs, where), (weights, same), (_, other) in zip(noted, again, free, strict=True):
        assert torch.equal(where, same)
        assert not torch.equal(where, other)  # the noise is large enough to matter
        if settings is COUNTED:
            assert where.sum(0).max() == CAPACITY  # tokens were dropped
        assert not torch.equal(probs, weights)
        assert bool((weights[~same] == 0).all())
        assert bool((weights[same] > 0).all())


def test_recompute_runs_a_forward_twice(model: list[torch.nn.Module]) -> None:
    """First without gradients, then with them when the backward comes. Both follow the first pass."""
    inputs = [tokens(seed) for seed in (1, 2, 3)]

    def recomputed(noise: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        outputs = []
        for ahead, x in enumerate(inputs):
            with torch.no_grad():
                forward(model, *[y + noise for y in (inputs[:2] if ahead == 0 else inputs[ahead + 1 : ahead + 2])])
            outputs += forward(model, x + noise)
        return outputs

    with routing_repeated(model) as routing:
        routing.start(first=True)
        noted = recomputed(0.0)
        routing.start(first=False)
        again = recomputed(0.7)
    assert all(torch.equal(first[1], repeat[1]) for first, repeat in zip(noted, again, strict=True))


def test_a_fused_router_routes_unfused_while_it_repeats(model: list[torch.nn.Module]) -> None:
    """Megatron's fused router needs Transformer Engine and replays nothing."""
    routers = list(model[0])  # type: ignore[call-overload]
    routers[0].config.moe_router_fusion = True
    x = torch.randn(TOKENS, 1, HIDDEN)
    with routing_repeated(model) as routing:
        routing.start(first=True)
        first = forward(model, x)
        routing.start(first=False)
        again = forward(model, x + torch.randn_like(x))
    assert all(router.config.moe_router_fusion for router in routers)
    for (_, chosen), (_, repeated) in zip(first, again, strict=True):
        assert torch.equal(chosen, repeated)


def test_a_rank_with_all_experts_sorts_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, their experts and the gradient are those of Megatron's second permutation, which moves none."""
    stream = mock.MagicMock()
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(f"torch.cuda.{name}", mock.MagicMock(return_value=stream))
    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", stream)
    router = routers_of(monkeypatch, moe_token_dispatcher_type="alltoall")[0][0]  # type: ignore[index]
    groups = ProcessGroupCollection.use_mpu_process_groups()

    def through(*, skips: bool) -> list[torch.Tensor]:
        layer = torch.nn.Module()
        layer.token_dispatcher = MoEAlltoAllTokenDispatcher(EXPERTS, list(range(EXPERTS)), router.config, groups)
        if skips:
            skip_sorting([layer])
            monkeypatch.setattr(token_dispatcher, "sort_chunks_by_idxs", None)
        dispatcher, x = layer.token_dispatcher, tokens(1).requires_grad_()
        probs, routing = router(x)
        rows = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, routing, probs))
        rows, splits, probs = dispatcher.dispatch_postprocess(*rows)
        y = dispatcher.combine_postprocess(
            dispatcher.token_combine(dispatcher.combine_preprocess(rows * probs[:, None]))
        )
        y.square().sum().backward()
        assert x.grad is not None
        return [rows, splits, y, x.grad]

    expected = through(skips=False)
    assert all(map(torch.equal, through(skips=True), expected))

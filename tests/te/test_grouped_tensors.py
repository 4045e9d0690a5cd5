"""Megatron 0.20's grouped tensors of experts: Transformer Engine runs them wherever the map quantises nothing."""

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)

import transformer_engine.pytorch as te
import transformer_engine_torch as tex  # type: ignore[import-not-found]
from megatron.core import dist_checkpointing
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from te_models import EXPERTS, SWIGLU, dense
from test_convert_experts import CONFIG, mlp
from torch import Tensor

from snip_megatron.layers import LinearRegistry
from snip_megatron.layers.grouped import grouped_product
from snip_megatron.megatron import convert_model, te_linears
from snip_megatron.precision import Format, PrecisionMap

pytestmark = [
    pytest.mark.usefixtures("model_parallel_of_one"),
    pytest.mark.skipif(
        not hasattr(TransformerConfig, "moe_use_grouped_tensor"), reason="Megatron 0.19 has no grouped tensors"
    ),
]

GROUPED: dict[str, Any] = EXPERTS | SWIGLU | {"moe_use_grouped_tensor": True}
SINGLE = GROUPED | {"moe_single_grouped_weight": True, "params_dtype": torch.bfloat16}
SPLITS = [5, 0, 130, 3]
BF16 = (Format.BF16,) * 3


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Torch in place of the card's kernels. Returns what Transformer Engine's linears ran: "native" or "split".

    The native path takes numbers of rows on the device, in multiples of 256, the other one a list.
    """
    seen: list[str] = []

    def moved(x: Tensor, out: Tensor, counts: Sequence[int], new: Sequence[int]) -> None:
        out.zero_()
        for to, rows in zip(torch.split(out, list(new)), torch.split(x, list(counts)), strict=True):
            to[: len(rows)] = rows[: len(to)]

    def forward(self: Any, x: Tensor, m_splits: Any, **_: Any) -> Tensor:
        if self.use_grouped_tensor:
            assert isinstance(m_splits, Tensor)
            assert not (m_splits % 256).any()
        seen.append("native" if self.use_grouped_tensor else "split")
        weights = self.weight.unbind(0) if self.single_grouped_weight else [*self._parameters.values()]
        weights = [weight for weight in weights if weight is not None and weight.dim() == 2]
        parts = torch.split(x, [int(count) for count in m_splits])
        return torch.cat([rows @ weight.t() for rows, weight in zip(parts, weights, strict=True)])

    def ours(handles: Any, weights: Any, x: Tensor, splits: Any, *rest: Any) -> Tensor:
        assert not isinstance(splits, Tensor)  # reading it would make the host wait
        return grouped_product(handles, weights, x, splits, *rest)

    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    monkeypatch.setattr(te_linears, "grouped_product", ours)
    monkeypatch.setattr(tex, "fused_multi_row_padding", moved)
    monkeypatch.setattr(tex, "fused_multi_row_unpadding", moved)
    monkeypatch.setattr(te.GroupedLinear, "forward", forward)
    with mock.patch("torch.cuda.synchronize"):
        yield seen


def converted(formats: tuple[tuple[Format, ...], tuple[Format, ...]] = (BF16, BF16)) -> tuple[GPTModel, LinearRegistry]:
    """A decoder whose experts' two linears have these formats."""
    chunk = dense(**GROUPED)
    registry = convert_model([chunk], CONFIG)
    registry.adopt(PrecisionMap.uniform(registry.names, Format.BF16))
    fc1, fc2 = linears(chunk)
    for linear, chosen in zip((fc1, fc2), formats, strict=True):
        for handle in linear.snip_experts:
            handle.state.formats = chosen
    return chunk, registry


def linears(chunk: GPTModel) -> tuple[Any, Any]:
    experts = chunk.decoder.layers[0].mlp.experts
    return experts.linear_fc1, experts.linear_fc2


def passes(chunk: GPTModel) -> list[Tensor]:
    """The output of the experts, and the gradients of X, of the probabilities and of the weights."""
    draws = torch.Generator().manual_seed(5)
    x = torch.randn(138, 128, generator=draws, requires_grad=True)
    probs = torch.rand(138, generator=draws, requires_grad=True)
    experts: Any = chunk.decoder.layers[0].mlp.experts
    y, _ = experts(x, torch.tensor(SPLITS), probs)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, probs, *experts.parameters()])]


def torch_mlp(chunk: GPTModel) -> list[Tensor]:
    experts: Any = chunk.decoder.layers[0].mlp.experts
    with mock.patch.object(
        type(experts), "forward", lambda _, x, counts, p: (mlp(experts, x, counts.tolist(), p), None)
    ):
        return passes(chunk)


def test_under_bf16_megatron_s_path_runs_bit_for_bit(card: list[str]) -> None:
    stock = passes(dense(**GROUPED))
    assert card == ["native"] * 2
    chunk, _ = converted()
    assert all(map(torch.equal, passes(chunk), stock))
    assert card == ["native"] * 4


FP8 = (Format.FP8,) * 3


@pytest.mark.parametrize(("formats", "ran"), [((FP8, FP8), []), ((FP8, BF16), ["split"]), ((BF16, FP8), ["split"])])
def test_what_is_quantised_is_ours(
    card: list[str], formats: tuple[tuple[Format, ...], tuple[Format, ...]], ran: list[str]
) -> None:
    chunk, _ = converted(formats)
    for actual, exact in zip(passes(chunk), torch_mlp(chunk), strict=True):
        assert (actual - exact).norm() <= 0.1 * exact.norm()
    assert card == ran
    for linear in linears(chunk):
        for handle in linear.snip_experts:
            handle.state.formats = BF16
    passes(chunk)
    assert card == [*ran, "native", "native"]  # the next map may be bf16 again


# -- all experts of a layer in one parameter ---------------------------------------------------------------------------
def test_single_grouped_weights_stay_transformer_engine_s(card: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    chunk = dense(**SINGLE)
    registry = convert_model([chunk], CONFIG)
    assert "mlp.experts.linear_fc1 of 2 layers stays bf16 (one parameter holds" in capsys.readouterr().out
    assert not any("experts" in name for name in registry.names)
    assert [type(linear).__name__[:2] for linear in linears(chunk)] == ["TE", "TE"]


def test_checkpoints_are_megatron_s_in_both_layouts(card: list[str]) -> None:
    """A job with single grouped weights can go on under a map that quantises experts, and the other way round."""
    single, apart = dense(**SINGLE), dense(**(SINGLE | {"moe_single_grouped_weight": False}))
    convert_model([apart], CONFIG)
    for source, target in ((single, apart), (apart, single)):
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.copy_(torch.randn(parameter.shape))
        target.load_state_dict(source.state_dict())
        for of_source, of_target in zip(linears(source), linears(target), strict=True):
            assert torch.equal(stacked(of_source), stacked(of_target))
    assert sharded(single) == sharded(apart)


def stacked(linear: Any) -> Tensor:
    return (
        linear.weight.detach()
        if linear.single_grouped_weight
        else torch.stack([getattr(linear, f"weight{e}").detach() for e in range(4)])
    )


def sharded(chunk: GPTModel) -> dict[str, Any]:
    """The part of each distributed checkpoint's tensor that this rank writes."""
    state = chunk.sharded_state_dict()
    return {
        name: (each.key, each.global_shape, each.global_offset, tuple(each.local_shape))
        for name, each in state.items()
        if isinstance(each, dist_checkpointing.ShardedTensor)
    }

"""Mixtures of experts of Hugging Face's in the plain loop: experts in one parameter are grouped linears."""

import copy
import re
from typing import Any

import pytest
import torch
from handles import Recorder
from test_models import TOKENS, train
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM, MixtralConfig, MixtralForCausalLM

from snip_megatron.plain import convert
from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.errors import SnipError

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 2}


def mixtral() -> Any:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, intermediate_size=48, num_local_experts=4)).train()


def gpt_oss() -> Any:
    """A mixture whose experts' weights are transposed and have biases."""
    return GptOssForCausalLM(GptOssConfig(**SIZES, intermediate_size=48, num_local_experts=4, head_dim=8))


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_experts_are_grouped_linears_that_are_measured_and_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    model = mixtral()
    before = {name: value.shape for name, value in model.state_dict().items()}
    snip, losses = train(model, estimator="fisher", budget="fp4=0.6")
    rows = {row.id.path: row for row in snip.registry.rows if row.id.layer == 0}
    first, second = rows["mlp.experts.gate_up_proj"], rows["mlp.experts.down_proj"]
    assert (first.n, first.k, first.experts, first.active) == (96, 32, 4, 2)
    assert (first.role, second.role, first.sub_block) == ("reads", "writes", 1)
    assert snip.table.tokens == TOKENS[0].numel()
    assert snip.map.version == 1
    assert {"decoder.layers.1.mlp.experts.down_proj:wgrad"} <= snip.map.choices.keys()
    assert snip.map.achieved >= 0.6
    assert losses[-1] < losses[0]
    assert {name: value.shape for name, value in model.state_dict().items()} == before
    assert "99% of the parameters" in capsys.readouterr().out


def test_statistics_of_experts_are_those_of_autograd() -> None:
    """‖∇W‖² and ‖X‖² of all experts of a layer, by its own code."""
    model = mixtral()
    other = copy.deepcopy(model)
    snip = convert(model, sgd(model), first_update=0)
    tokens, layer = TOKENS[0], other.model.layers[1].mlp.experts
    rows: list[torch.Tensor] = []
    layer.register_forward_pre_hook(lambda module, args: rows.append(args[0].detach()))
    other(input_ids=tokens, labels=tokens).loss.backward()
    snip.step(lambda: model(input_ids=tokens, labels=tokens).loss)
    index = [row.id.path for row in snip.table.linears].index("mlp.experts.gate_up_proj", 7)
    assert snip.table.linear["x2"][index] == pytest.approx(float(2 * rows[0].double().square().sum()), rel=1e-4)
    weights = layer.gate_up_proj.detach().double().square().sum()
    assert snip.table.linear["w2"][index] == pytest.approx(float(weights), rel=1e-4)


@pytest.mark.parametrize("wide", [False, True])
def test_forward_and_backward_are_the_modules_own(wide: bool) -> None:
    """FP32 tensors in bf16 formats give what the module's own code gives in float64. Quantised ones nearly do."""
    model = mixtral()
    reference = copy.deepcopy(model).double().model.layers[0].mlp
    reference.experts.config._experts_implementation = "eager"  # its grouped products know no float64
    snip = convert(model, sgd(model), policy="bf16" if wide else "uniform-fp8")
    if wide:  # a map that quantises another linear does not run the module's own code in a probe only
        for handle in snip.registry:
            handle.state.recorder = Recorder()
        snip.registry.context.probing = True
    mlp = model.model.layers[0].mlp
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(4))
    results = []
    for module, rows in ((mlp, x.clone()), (reference, x.double())):
        rows.requires_grad_()
        y = module(rows)
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        results.append([y, rows.grad, *(p.grad for p in module.parameters())])
    for ours, theirs in zip(*results, strict=True):
        error = float((ours.double() - theirs).norm() / theirs.norm())
        assert error < (1e-5 if wide else 0.1)
        assert wide or error > 1e-4


def test_experts_without_tokens_and_copies_and_evaluation() -> None:
    model = mixtral()
    optimizer = torch.optim.AdamW(model.parameters())
    convert(model, optimizer, policy="uniform-fp4")
    experts = model.model.layers[0].mlp.experts
    x, index = torch.randn(5, 32), torch.tensor([[0, 2]] * 5)
    experts(x, index, torch.full((5, 2), 0.5)).sum().backward()
    assert not experts.gate_up_proj.grad[[1, 3]].any()
    assert experts.gate_up_proj.grad[[0, 2]].any(dim=(1, 2)).all()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(experts(x, index, torch.full((5, 2), 0.5))).all()
    assert type(copy.deepcopy(experts)) is type(mixtral().model.layers[0].mlp.experts)


def test_all_bf16_is_bitwise_the_model() -> None:
    def loss_of(policy: str) -> list[float]:
        return train(mixtral(), policy=policy)[1] if policy else _alone(mixtral())

    assert loss_of("bf16") == loss_of("")
    assert loss_of("uniform-fp8") != loss_of("")


def _alone(model: Any) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for tokens in TOKENS[:4]:
        optimizer.zero_grad()
        value = model(input_ids=tokens, labels=tokens).loss
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def test_other_mixtures_are_refused_unless_told(capsys: pytest.CaptureFixture[str]) -> None:
    model = gpt_oss()
    words = r"self_attn.q_proj .*stays as it is: mlp.experts.gate_up_proj \(GptOssExperts, .*allow_partial=True"
    with pytest.raises(SnipError, match=words):
        convert(model, sgd(model))
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    snip = convert(model, sgd(model), allow_partial=True, budget="fp4=0.1")
    said = capsys.readouterr().out
    share = float(re.search(r"(\d+)% of the FLOPs", said)[1]) / 100
    tokens = TOKENS[0]
    snip.step(lambda: model(input_ids=tokens, labels=tokens).loss)
    with pytest.raises(SnipError, match=r"budget='fp4=0.75' is unreachable"):  # the share is of all matrices
        convert(gpt_oss(), sgd(gpt_oss()), allow_partial=True, budget="fp4=0.75", policy="snip")
    assert 0 < share < 0.5


def test_weight_divergence_of_experts_is_refused() -> None:
    model = mixtral()
    with pytest.raises(SnipError, match="estimator='noise'"):
        convert(model, torch.optim.AdamW(model.parameters()), estimator="noise")
    assert isinstance(convert(model, sgd(model)).map, PrecisionMap)

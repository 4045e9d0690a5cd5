"""The plain loop on models that people have: Hugging Face's, checkpointed, compiled, with frozen linears."""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_plain_loop import load
from transformers import LlamaConfig, LlamaForCausalLM

from snip_megatron.plain import PlainSnip, convert
from snip_megatron.plain.trainer import SnipCallback
from snip_megatron.precision.errors import SnipError

TOKENS = torch.randint(0, 64, (6, 4, 16), generator=torch.Generator().manual_seed(5))


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **options)).train()


def train(
    model: Any, wrap: Callable[[Any], Any] = lambda model: model, **options: Any
) -> tuple[PlainSnip, list[float]]:
    """Train four steps with an update before the third. The model is wrapped after it is converted."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    snip = convert(model, optimizer, **{"first_update": 2, "update_interval": 100, "estimator": "noise"} | options)
    model, losses = wrap(model), []
    for step, tokens in enumerate(TOKENS[:4]):

        def loss(tokens: torch.Tensor = tokens) -> torch.Tensor:
            result: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
            return result

        torch.manual_seed(step)
        snip.step(loss)
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return snip, losses


@pytest.fixture(scope="module")
def usual() -> tuple[PlainSnip, list[float]]:
    return train(llama())


def places(snip: PlainSnip) -> dict[str, tuple[int, str]]:
    return {row.id.path: (row.sub_block, row.role.value) for row in snip.registry.rows if row.id.layer == 0}


def test_llama_has_seven_linears_a_block(usual: tuple[PlainSnip, list[float]]) -> None:
    snip, _ = usual
    attention = {f"self_attn.{name}_proj": (0, "reads") for name in "qkv"} | {"self_attn.o_proj": (0, "writes")}
    mlp = {f"mlp.{name}_proj": (1, "reads") for name in ("gate", "up")} | {"mlp.down_proj": (1, "writes")}
    assert places(snip) == attention | mlp
    assert (snip.map.version, snip.map.status) == (1, "optimal")
    assert (snip.table.arrays["drift2"] > 0).all()


@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "tied"])
def test_activation_checkpointing_changes_no_statistic(way: str, usual: tuple[PlainSnip, list[float]]) -> None:
    """The hooks of a block run inside of its checkpoint, and once more in the backward."""
    model = llama(tie_word_embeddings=way == "tied")
    reference = train(copy.deepcopy(model)) if way == "tied" else usual
    model.gradient_checkpointing_enable({"use_reentrant": way == "reentrant"})
    snip, losses = train(model)
    assert losses == reference[1]
    for name, column in snip.table.arrays.items():
        np.testing.assert_allclose(column, reference[0].table.arrays[name], rtol=1e-6, atol=1e-12, err_msg=name)


def test_compiled_models_train_as_others(usual: tuple[PlainSnip, list[float]]) -> None:
    snip, losses = train(llama(), lambda model: torch.compile(model, backend="aot_eager"))
    assert snip.map.choices == usual[0].map.choices
    np.testing.assert_allclose(losses, usual[1], rtol=1e-5)


def test_frozen_linears_are_quantised_without_wgrad() -> None:
    model = llama()
    for layer in model.model.layers:
        layer.mlp.down_proj.requires_grad_(False)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    snip, _ = train(model)
    assert "decoder.layers.0.mlp.down_proj:fprop" in snip.map.choices
    assert not any(key.endswith("down_proj:wgrad") for key in snip.map.choices)
    assert snip.map.achieved >= 0.75
    assert all(torch.equal(model.get_parameter(name), before) for name, before in frozen.items())


def test_the_example_shows_which_linears_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hf_nvfp4.py", "--steps", "5", "--dir", str(tmp_path / "run")])
    load("hf_nvfp4").main()
    shown = capsys.readouterr().out
    assert "step 4: map 2, 75% of the FLOPs in NVFP4" in shown
    by_kind, ranked = shown.partition("nats of training loss")[2].split("The 20 most sensitive of 84:")
    assert len([line for line in by_kind.splitlines() if "_proj:" in line]) == 3 * 7
    assert ranked.count("decoder.layers.") == 20
    assert shown.endswith(f"the map as a picture: {tmp_path / 'run' / 'report.html'}\n")
    assert "mlp.down_proj" in (tmp_path / "run" / "report.html").read_text()


def test_the_callback_of_a_trainer_takes_what_its_state_can_keep() -> None:
    state = json.loads(json.dumps(SnipCallback(budget="fp4=0.5", pin=("*=fp8",)).state()))
    assert SnipCallback.from_state(state).state() == state
    with pytest.raises(SnipError, match="on_adopt= cannot be kept"):
        SnipCallback(on_adopt=print)

"""Sizes of models: the known ones have their published number of parameters, files are read or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from refusal import refusal

from snip_megatron.planner.models import from_hugging_face, load_llama
from snip_megatron.precision.errors import SnipError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("1b", 1_100_048_384),
        ("3b", 3_426_473_600),
        ("7b", 6_738_415_616),
        ("8b", 8_030_261_248),
        ("70b", 70_553_706_496),
        ("405b", 405_853_388_800),
    ],
)
def test_known_models_have_their_published_size(name: str, parameters: int) -> None:
    assert load_llama(name).model().parameters == parameters
    assert load_llama(f"llama-{name}") == load_llama(name.upper()) == load_llama(name)


def test_a_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    found, known = load_llama(str(path)), load_llama("8b")
    assert (found.model().rows, found.model().parameters) == (known.model().rows, known.model().parameters)
    assert found.context == 8192
    assert load_llama(str(tmp_path)).name == str(path)


def test_defaults_of_a_configuration() -> None:
    few = {key: CONFIG[key] for key in CONFIG if key not in ("num_key_value_heads", "max_position_embeddings")}
    found = from_hugging_face(json.dumps(few | {"head_dim": 64, "tie_word_embeddings": True}), where="c")
    assert (found.groups, found.head_size, found.context, found.tied) == (32, 64, 2048, True)
    assert (found.model().rows[1].n, found.model().rows[1].k) == (4096, 32 * 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "c: model_type: must be \"llama\", got 'mixtral'"),
        ({"hidden_act": "gelu"}, 'c: hidden_act: must be "silu"'),
        ({"mlp_bias": True}, "c: mlp_bias: linears with biases"),
        ({"hidden_size": None}, "c: hidden_size: missing"),
        ({"hidden_size": 4096.0}, "c: hidden_size: must be a whole number"),
        ({"num_hidden_layers": 10**6}, "c: num_hidden_layers: must be a whole number from 1 to 10000"),
        ({"num_attention_heads": 24}, "c: hidden_size 4096 is not divisible by num_attention_heads 24"),
        ({"num_key_value_heads": 5}, "c: num_attention_heads 32 is not divisible by num_key_value_heads 5"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    assert refusal(from_hugging_face, json.dumps(CONFIG | change), where="c").startswith(message)


@example("x" * 5000)
@given(st.text(max_size=60))
def test_any_name_is_a_model_or_one_line(name: str) -> None:
    message = ""
    try:
        load_llama(name)
    except SnipError as error:
        message = str(error)
    assert "\n" not in message

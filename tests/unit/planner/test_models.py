"""Sizes of models: the known ones have their published number of parameters, other names are refused."""

import pytest

from snip_megatron.planner.models import load_llama


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

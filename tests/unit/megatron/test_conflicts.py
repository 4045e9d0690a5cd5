"""Each argument of Megatron that SNIP refuses is one of this Megatron, and the error names both sides."""

import re
from pathlib import Path
from typing import Any

import pytest
from llama_arguments import DEFAULTS, arguments, megatron_parser, refused

from snip_megatron.config import SnipConfig
from snip_megatron.megatron.conflicts import CONFLICTS, Conflict

# A value that conflicts, where it is not True.
VALUES: dict[str, Any] = {
    "te_precision_config_file": "recipe.yaml",
    "kitchen_config_file": "kitchen.yaml",
    "gtp_weight_remat_size": 2,
    "mlp_chunks_for_training": 2,
    "experimental_attention_variant": "dsa",
    "heterogeneous_layers_config_path": "blocks.json",
    "non_persistent_ckpt_type": "local",
}
# Arguments that exist only with an optional library.
OPTIONAL = {"--kitchen-config-file", "--use-kitchen"}


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda c: c.attribute)
def test_each_conflict_names_both_sides(conflict: Conflict) -> None:
    value = VALUES.get(conflict.attribute, True)
    message = refused(SnipConfig(enabled=True), arguments(**{conflict.attribute: value}))
    shown = "" if value is True or conflict.derived else f" {value}"
    assert message.startswith(f"{conflict.argument}{shown} cannot be combined with --snip: ")


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda c: c.attribute)
def test_each_conflict_is_an_argument_of_this_megatron(conflict: Conflict) -> None:
    """A renamed argument or attribute would make the check pass in silence."""
    dests = {flag: action.dest for action in megatron_parser()._actions for flag in action.option_strings}
    if conflict.argument in OPTIONAL:
        assert conflict.argument not in dests
        return
    assert conflict.argument in dests
    assert dests[conflict.argument] == conflict.attribute or conflict.derived
    assert not conflict.present(DEFAULTS.get(conflict.attribute))


def test_the_page_lists_each_of_them() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text(encoding="utf-8")
    listed = [
        flag for row in page.splitlines() if row.startswith("| `--snip`: ") for flag in re.findall("`(--.*?)`", row)
    ]
    assert sorted(set(listed) - {"--snip"}) == sorted(conflict.argument for conflict in CONFLICTS)

"""Each argument of Megatron that SNIP refuses is one of this Megatron, and the error names both sides."""

import re
from pathlib import Path
from typing import Any

import pytest
from llama_arguments import DEFAULTS, arguments, megatron_parser, refused

from snip_megatron.megatron.validate import CONFLICTS
from snip_megatron.runtime.config import SnipConfig

# A value that conflicts, where it is not True.
VALUES: dict[str, Any] = {
    "gtp_weight_remat_size": 2,
    "mlp_chunks_for_training": 2,
    "non_persistent_ckpt_type": "local",
}
# Arguments that exist only with an optional library.
OPTIONAL = {"--kitchen-config-file", "--use-kitchen"}
DERIVED = {"--tensor-parallel-num-weight-shards", "--non-persistent-ckpt-type local"}
"""Arguments whose message has no value: Megatron computes it, or the entry names it."""


@pytest.mark.parametrize("argument", CONFLICTS)
def test_each_conflict_names_both_sides_and_is_an_argument_of_this_megatron(argument: str) -> None:
    """A renamed argument or attribute would make the check pass in silence."""
    attribute, present, _ = CONFLICTS[argument]
    value = VALUES.get(attribute, True)
    message = refused(SnipConfig(enabled=True), arguments(**{attribute: value}))
    shown = "" if value is True or argument in DERIVED else f" {value}"
    assert message.startswith(f"{argument}{shown} cannot be combined with --snip: ")
    dests = {flag: action.dest for action in megatron_parser()._actions for flag in action.option_strings}
    flag = argument.partition(" ")[0]
    assert (flag in dests) == (argument not in OPTIONAL)
    assert dests.get(flag, attribute) == attribute or attribute == "gtp_weight_remat_size"  # which Megatron computes
    assert not present(DEFAULTS.get(attribute))


def test_the_page_lists_each_of_them() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text(encoding="utf-8")
    listed = [
        flag for row in page.splitlines() if row.startswith("| `--snip`: ") for flag in re.findall("`(--.*?)`", row)
    ]
    assert sorted(set(listed) - {"--snip"}) == sorted(CONFLICTS)

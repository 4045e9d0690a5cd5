"""When a resume needs help to load what it does not save. tests/e2e/test_compare_command.py shows that it loads."""

from __future__ import annotations

import argparse

import pytest

from snip_megatron.megatron.compat import partial_save


@pytest.mark.parametrize(
    ("load", "no_save_optim", "no_save_rng", "needed"),
    [("c", True, None, True), ("c", None, True, True), ("c", None, None, False), (None, True, True, False)],
)
def test_only_a_resume_that_saves_less_needs_the_set(
    load: str | None, no_save_optim: bool | None, no_save_rng: bool | None, needed: bool
) -> None:
    args = argparse.Namespace(load=load, no_save_optim=no_save_optim, no_save_rng=no_save_rng)
    assert partial_save.is_needed(args) == needed

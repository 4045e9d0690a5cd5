"""``partial-save``: ``--no-save-optim`` and ``--no-save-rng`` say what is saved, not what is loaded.

Megatron plans a load by the same function as a save, which leaves out the optimizer and the random state under these
arguments. A run that resumes with them therefore ends with a KeyError, because the state that it was about to load is
missing in the plan (seen in 0.19).
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import megatron.training.training as training
from megatron.training import get_args

from snip_megatron.megatron.compat.versions import check_signature

check_signature(training.load_checkpoint, "ddp_model", "optimizer", "opt_param_scheduler", "load_arg")
_load_checkpoint = training.load_checkpoint
_ARGUMENTS = ("no_save_optim", "no_save_rng")


def is_needed(args: argparse.Namespace) -> bool:
    """Whether a run that may resume saves less than it loads."""
    return bool(args.load and any(getattr(args, name) for name in _ARGUMENTS))


def install() -> str:
    """Wrap Megatron's ``load_checkpoint``. Returns a description for the list printed at start."""
    training.load_checkpoint = _load_everything
    return "optimizer and random state are loaded, although they are not saved"


@functools.wraps(_load_checkpoint)
def _load_everything(*positional: Any, **named: Any) -> Any:
    args = get_args()
    given = {name: getattr(args, name) for name in _ARGUMENTS}
    vars(args).update(dict.fromkeys(_ARGUMENTS))
    try:
        return _load_checkpoint(*positional, **named)
    finally:
        vars(args).update(given)

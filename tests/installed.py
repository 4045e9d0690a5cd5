"""Files of the installed megatron-core."""

import importlib.util
import shutil
from pathlib import Path


def installed_megatron() -> Path:
    """The folder of the installed ``megatron`` package."""
    spec = importlib.util.find_spec("megatron.training")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def copy_installed(into: Path, *, only: str = "megatron") -> Path:
    """``into`` with a copy of the installed package or of one of its files, to be changed.

    Byte code comes along: Python compiles again what has another time or size than its source had.
    """
    source, target = installed_megatron().parent / only, into / only
    target.parent.mkdir(parents=True, exist_ok=True)
    (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    return into

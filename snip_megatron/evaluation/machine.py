"""Facts about the machine of a result: hardware, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "megatron-core", "triton", "ortools")


def visible_gpus() -> list[str]:
    """Return the CUDA devices by their names in ``CUDA_VISIBLE_DEVICES``. No CUDA context is created."""
    import torch

    count = torch.cuda.device_count()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[:count] if len(named) >= count else [str(i) for i in range(count)]


def describe(gpus: list[str]) -> dict[str, str]:
    """Return hardware, versions and commit, which every result contains."""
    hardware = f"{len(os.sched_getaffinity(0))} CPU cores ({platform.machine()})"
    if gpus:  # asking CUDA for the name would create a context in this process
        names = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "GPU"
        hardware = f"{len(gpus)} × {names.splitlines()[0].strip()}, {hardware}"
    versions = {name: _version(name) for name in PACKAGES}
    return {"hardware": hardware, "python": platform.python_version(), **versions, "commit": _commit()}


def _commit() -> str:
    """Return the commit of this package: the variable ``SNIP_COMMIT`` if it is set, else git's answer."""
    if named := os.environ.get("SNIP_COMMIT"):
        return named
    git = ("git", "-C", str(Path(__file__).resolve().parents[1]))
    head = _output(*git, "rev-parse", "HEAD")
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return head + ("+changes" if changed else "") if head else "unknown"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"

"""Facts about the machine of a result: hardware, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path


def visible_gpus() -> list[str]:
    """Return the CUDA devices by their names in ``CUDA_VISIBLE_DEVICES``. No CUDA context is created."""
    import torch

    count = torch.cuda.device_count()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[:count] if len(named) >= count else [str(i) for i in range(count)]


def describe(gpus: list[str]) -> dict[str, str]:
    """Return hardware and versions of this machine for a result file."""
    hardware = f"{len(os.sched_getaffinity(0))} CPU cores ({platform.machine()})"
    if gpus:
        hardware = f"{len(gpus)} × {_gpu_name()}, {hardware}"
    packages = {name: _version(name) for name in ("torch", "megatron-core", "triton", "ortools")}
    return {"hardware": hardware, "python": platform.python_version()} | packages


def commit() -> str:
    """Return the commit of this package: the variable ``SNIP_COMMIT`` if it is set, else git's answer."""
    if named := os.environ.get("SNIP_COMMIT"):
        return named
    folder = Path(__file__).resolve().parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", "."],
            cwd=folder.parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


def _gpu_name() -> str:
    """Return the GPU's name from ``nvidia-smi``. Asking CUDA would create a context in this process."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return "GPU"
    return names[0].strip() or "GPU"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"

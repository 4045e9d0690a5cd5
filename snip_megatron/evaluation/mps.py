"""NVIDIA's Multi-Process Service, with which small runs use a GPU at the same time.

Without it, the GPU switches between processes, and it is idle while the current process waits for its CPU. The service
is a daemon of this user with its pipes in a separate folder. It changes no setting of the device and ends with the
comparison.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PLACES = ("/usr/local/nvidia/bin", "/usr/bin")
_PROBE = "import torch; x = torch.ones(256, 256, device='cuda'); assert float((x @ x).sum()) == 256**3"
_TIMEOUT_S = 90


@contextmanager
def multi_process_service(folder: Path) -> Iterator[tuple[Mapping[str, str], str]]:
    """Start the service, and end it with the context.

    Args:
        folder: the folder for pipes and logs.

    Yields:
        Environment variables for the clients, and one line about the outcome. The variables are empty if the service
        is not installed, does not start, or fails a first computation. It is then not running.
    """
    control = shutil.which(CONTROL) or shutil.which(CONTROL, path=os.pathsep.join(PLACES))
    if control is None:
        yield {}, f"no {CONTROL} on this machine: processes take turns on a GPU"
        return
    folder.mkdir(parents=True, exist_ok=True)
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    environment = {**os.environ, **variables}
    fault = _start(control, environment)
    try:
        if fault is None:
            yield variables, "Multi-Process Service: processes share a GPU at the same time"
        else:
            _quit(control, environment)
            yield {}, f"no Multi-Process Service ({fault}): processes take turns on a GPU"
    finally:
        if fault is None:
            _quit(control, environment)


def _start(control: str, environment: Mapping[str, str]) -> str | None:
    """Start the service and test it. Returns None if it works, else the reason why not."""
    for command in ([control, "-d"], [sys.executable, "-c", _PROBE]):
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return type(error).__name__
        if done.returncode != 0:
            lines = (done.stdout + done.stderr).strip().splitlines()
            return lines[-1][:200] if lines else f"exit code {done.returncode}"
    return None


def _quit(control: str, environment: Mapping[str, str]) -> None:
    try:
        subprocess.run(
            [control], env=environment, input="quit\n", capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return

"""What must be settled before torch and Megatron are imported: environment, CPU or GPU, which patches are off.

Megatron binds names of ``torch.cuda`` and decorates functions with ``torch.compile`` while it is imported, so this
module imports neither at its top.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from snip_megatron.errors import SnipError

#: Named sets of compatibility patches: each off by ``--snip-no-compat NAME``.
COMPAT_SETS: dict[str, str] = {
    "cpu": "no CUDA device: CUDA calls answered by the CPU, gloo instead of nccl, fused kernels off",
    "dataset-helpers": "this Megatron ships its dataset index builder compiled and without a Makefile",
    "missing-extensions": "fusions off whose extension (Apex, Transformer Engine) is not installed",
    "torch-norm-sequence-parallel": "torch's norm under --sequence-parallel, its gradient summed over tensor parallel",
    "step-hook": "SNIP's step and validation hooks where this Megatron's source has none (patches/)",
    "checkpoint-fallback": "a checkpoint that a kill left incomplete is passed over for the newest complete one",
    "restart-store": "ranks that torchrun starts again do not meet under the keys of those that have died",
    "distributed-optimizer-resume": "the distributed optimizer over torch's AdamW resumes with its step and moments",
}


@dataclass(frozen=True)
class Startup:
    """What was decided before the imports.

    ``on_cpu``: no CUDA device, the ``cpu`` patches are in. ``disabled``: compat sets that the user switched off.
    """

    on_cpu: bool
    disabled: frozenset[str]

    def allows(self, name: str) -> bool:
        """Whether the compat set ``name`` may be used."""
        return name not in self.disabled


def is_rank_zero() -> bool:
    """Whether this process is the first of the launcher's world (no process group needed)."""
    return int(os.environ.get("RANK", "0")) == 0


def check_compat_names(names: Sequence[str]) -> frozenset[str]:
    """The set of ``names``. Raises SnipError that lists the known ones if one is unknown."""
    for name in names:
        if name not in COMPAT_SETS:
            raise SnipError(f"--snip-no-compat {name}: unknown; choose one of {', '.join(COMPAT_SETS)}")
    return frozenset(names)


def check_sources(argv: Sequence[str]) -> None:
    """Raise SnipError if arguments shall come from a file: Megatron would drop the command line, ``--snip-*`` with it.

    What it makes of the file has other names and levels than its arguments; our entry reads the arguments.
    """
    if any(given.partition("=")[0] == "--yaml-cfg" for given in argv):
        raise SnipError(
            "--yaml-cfg is not supported: Megatron would ignore all other arguments, --snip-* among them; give its"
            " arguments on the command line"
        )


def prepare(argv: Sequence[str], no_compat: Sequence[str]) -> Startup:
    """Set the environment, decide between GPU and CPU and, on CPU, patch torch. Call before importing Megatron.

    ``argv`` is the command line without the program's name, ``no_compat`` the values of ``--snip-no-compat``. What
    the user set in the environment stays. Raises SnipError on an unknown name, on arguments of a file, or without a
    CUDA device when the ``cpu`` set is off.
    """
    check_sources(argv)
    disabled = check_compat_names(no_compat)
    if not {"--use-megatron-fsdp", "--use-torch-fsdp2"}.intersection(argv):
        # Overlap of communication and GEMMs relies on one hardware queue; Megatron asserts it (FSDP the opposite).
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

    import torch

    if torch.cuda.is_available():
        return Startup(on_cpu=False, disabled=disabled)
    if "cpu" in disabled:
        raise SnipError("no CUDA device is visible and --snip-no-compat cpu forbids running on the CPU")
    from snip_megatron.megatron import cpu_device

    # Megatron's advice to install GPU libraries, once a module that would use one.
    warnings.filterwarnings("ignore", message=".*(Apex|[Tt]ransformer.[Ee]ngine)", category=UserWarning)
    cpu_device.install()
    return Startup(on_cpu=True, disabled=disabled)

"""Sets up the environment, and the CPU in place of a GPU, before Megatron is imported.

While it is imported, Megatron binds names of ``torch.cuda`` and decorates functions with ``torch.compile``. This module
therefore imports neither torch nor Megatron at its top.
"""

import contextlib
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from snip_megatron.precision.errors import AgreedError, SnipError, first_line, quoted

OLDEST, BEYOND = (0, 19, 2), (0, 21, 0)  # the first supported release, and the first later one that is not tested

SUPPORTED = ">=0.19.2,<0.21"

#: Compatibility sets, which ``megatron/README.md`` describes. ``--snip-no-compat NAME`` switches one off.
COMPAT_SETS = (
    "cpu",
    "dataset-helpers",
    "missing-extensions",
    "torch-norm-sequence-parallel",
    "step-hook",
    "distributed-optimizer-resume",
)

#: Name of the environment variable with the file for a failing rank's exit code.
EXIT_CODE_FILE = "SNIP_EXIT_CODE_FILE"

#: Seconds that the first rank of another node waits for rank 0 to print an error, half of what all others wait.
_PATIENCE = 20.0


@dataclass(frozen=True)
class Startup:
    """Result of :func:`prepare`."""

    on_cpu: bool  # whether there is no CUDA device, so that the ``cpu`` set is installed
    disabled: frozenset[str]  # compatibility sets that the user switched off

    def allows(self, name: str) -> bool:
        """Whether the compat set ``name`` may be used."""
        return name not in self.disabled


def check_version(text: str) -> tuple[int, int]:
    """Return (major, minor) of a version such as ``0.19.2rc1+abc``. Raises SnipError if it is too old.

    Later releases are accepted. :func:`names_checked` refuses those that differ in a name.
    """
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None:
        raise SnipError(f"megatron-core has version {quoted(text)}, which cannot be read; supported: {SUPPORTED}")
    version = int(match[1]), int(match[2]), int(match[3] or 0)
    if version < OLDEST:
        raise SnipError(f"megatron-core {text} is installed; snip_megatron supports {SUPPORTED}")
    return version[:2]


def untested() -> str | None:
    """Return a notice if the installed release is later than the supported ones. Raises SnipError if it is earlier."""
    from megatron.core.package_info import __version__

    newer = check_version(__version__) >= BEYOND[:2]
    return f"megatron-core {__version__} is newer than the releases that were tested ({SUPPORTED})" if newer else None


@contextlib.contextmanager
def names_checked() -> Iterator[None]:
    """Import modules that use Megatron's names inside this context.

    Raises SnipError if the installed release is too old, or if it is newer than the tested ones and lacks a name.
    """
    notice = untested()
    try:
        yield
    except ImportError as error:
        if notice is None:
            raise
        raise SnipError(f"{notice} and differs: {first_line(error)}") from error


def is_rank_zero() -> bool:
    """Whether this process is rank 0 according to the launcher's environment. No process group is needed."""
    return int(os.environ.get("RANK", "0")) == 0


def say(line: str, who: str = "snip") -> None:
    """Print a line of a training on rank 0."""
    if is_rank_zero():
        print(f"{who}: {line}", flush=True)


def report(error: SnipError, program: str) -> None:
    """Print an error in one line that starts with the name of the program.

    Most errors occur on all ranks, or on all ranks of a node. The first of these ranks prints the line and ends, and
    the launcher then ends the others. A rank that is not ended prints its own error after a while. An error that says
    ``is_cause`` is of one rank, and the errors of other ranks follow from it.
    """
    note_exit_code(error.exit_code)
    if isinstance(error, AgreedError):
        return
    rank = "" if is_rank_zero() else f"[rank {os.environ['RANK']}] "
    if not getattr(error, "is_cause", is_rank_zero()):
        time.sleep(_PATIENCE if os.environ.get("LOCAL_RANK") == "0" else 2 * _PATIENCE)
    print(f"{program}: {rank}{error}", file=sys.stderr, flush=True)


def note_exit_code(code: int) -> None:
    """Write a code other than 0 to the file that ``snip launch`` reads. torchrun itself ends with 1 for any code."""
    file = os.environ.get(EXIT_CODE_FILE)
    if file and code:
        with contextlib.suppress(OSError):
            Path(file).write_text(f"{code}\n", encoding="ascii")


def check_compat_names(names: Sequence[str]) -> frozenset[str]:
    """Return the set of ``names``. Raises SnipError if one is unknown."""
    for name in names:
        if name not in COMPAT_SETS:
            raise SnipError(f"--snip-no-compat {name}: unknown; choose one of {', '.join(COMPAT_SETS)}")
    return frozenset(names)


def check_sources(argv: Sequence[str]) -> None:
    """Raise SnipError if ``--yaml-cfg`` is given: Megatron would drop all other arguments, ``--snip-*`` included.

    Megatron also gives the file's values other names and a nested structure, which this entry does not read.
    """
    if any(argument.partition("=")[0] == "--yaml-cfg" for argument in argv):
        raise SnipError(
            "--yaml-cfg is not supported: Megatron would ignore all other arguments, --snip-* among them; give its"
            " arguments on the command line"
        )


def prepare(argv: Sequence[str], no_compat: Sequence[str]) -> Startup:
    """Set environment variables and, without a CUDA device, patch torch. Must be called before importing Megatron.

    Variables that are already set are kept. Raises SnipError if a value of ``no_compat`` is unknown, if ``--yaml-cfg``
    is given, or if there is no CUDA device and the ``cpu`` set is off. ``argv`` is the command line without the
    program's name.
    """
    check_sources(argv)
    disabled = check_compat_names(no_compat)
    if not {"--use-megatron-fsdp", "--use-torch-fsdp2"}.intersection(argv):
        # Overlap of communication and GEMMs needs one hardware queue. Megatron asserts this, and the opposite for FSDP.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

    import torch

    if torch.cuda.is_available():
        return Startup(on_cpu=False, disabled=disabled)
    if "cpu" in disabled:
        raise SnipError("no CUDA device is visible and --snip-no-compat cpu forbids running on the CPU")
    from snip_megatron.megatron import cpu_device

    # Each module that could use a GPU library advises to install it.
    warnings.filterwarnings("ignore", message=".*(Apex|[Tt]ransformer.[Ee]ngine)", category=UserWarning)
    cpu_device.install()
    return Startup(on_cpu=True, disabled=disabled)


def current(no_compat: Sequence[str]) -> Startup:
    """Return the result of :func:`prepare` in this process, or an equal one where it was not called.

    Raises SnipError if a value of ``no_compat`` is unknown.
    """
    from snip_megatron.megatron import cpu_device

    return Startup(on_cpu=cpu_device.is_installed(), disabled=check_compat_names(no_compat))

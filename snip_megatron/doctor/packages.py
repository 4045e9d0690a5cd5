"""Checks the versions of required and optional packages. The packages are not imported."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from snip_megatron.doctor.check import Check, fail, note, ok
from snip_megatron.megatron.supported import BEYOND, OLDEST

ROOM = "packages"
_OLDEST_PYTHON = (3, 12)


@dataclass(frozen=True)
class Requirement:
    """A distribution and its supported versions: ``oldest`` ≤ version < ``beyond``. None means no limit."""

    name: str
    oldest: tuple[int, ...] | None = None
    beyond: tuple[int, ...] | None = None

    @property
    def range(self) -> str:
        """The range in pip's notation."""
        parts = [f">={_text(self.oldest)}"] if self.oldest else []
        return ",".join([*parts, f"<{_text(self.beyond)}"] if self.beyond else parts)

    def admits(self, version: tuple[int, ...]) -> bool:
        """Whether the range includes the version."""
        return (self.oldest is None or version >= self.oldest) and (self.beyond is None or version < self.beyond)


MEGATRON = Requirement("megatron-core", OLDEST, BEYOND)
REQUIRED = (
    Requirement("torch", (2, 8)),
    MEGATRON,
    Requirement("ortools", (9, 15), (10,)),
    Requirement("numpy", (2,)),
    Requirement("scipy", (1, 14)),
    Requirement("omegaconf", (2, 3)),
    Requirement("psutil", (6,)),
    Requirement("jinja2", (3,)),
)
EXTRAS = (
    (Requirement("transformers", (5,)), "text", "--tokenizer-type HuggingFaceTokenizer"),
    (Requirement("tokenizers", (0, 22)), "text", "snip prepare-data"),
    (Requirement("tqdm", (4, 66)), "text", "snip prepare-data"),
    (Requirement("plotly", (6,)), "report", "a report, snip compare or snip validate-proxy"),
    (Requirement("wandb", (0, 22)), "wandb", "--wandb-project"),
    (Requirement("tensorboard", (2, 19)), "tensorboard", "--tensorboard-dir"),
)
"""(Requirement, extra of snip_megatron that brings it, what needs it): what a training itself does not import."""
OPTIONAL = (
    (Requirement("triton", (3, 4)), "the quantisation kernels of a GPU need it"),
    (
        Requirement("transformer-engine", (2, 9)),
        "--transformer-impl transformer_engine and the Blackwell GEMMs need it",
    ),
    (Requirement("apex"), "never needed; Megatron's fused kernels use it where it is"),
    (Requirement("megatron-bridge", (0, 6), (0, 7)), "the Bridge callback needs it"),
    (
        Requirement("sgl-deep-gemm", (0, 1, 4), (0, 1, 5)),
        "faster fp8 and fp4 GEMMs on Hopper, with nvcc and torch 2.11: pip install 'snip_megatron[deepgemm]'",
    ),
    *(
        (requirement, f"{purpose} needs it: pip install 'snip_megatron[{extra}]'")
        for requirement, extra, purpose in EXTRAS
    ),
)


def check_packages() -> Iterator[Check]:
    """Check Python, the required packages and the optional packages."""
    version = platform.python_version()
    if sys.version_info[:2] >= _OLDEST_PYTHON:
        yield ok(ROOM, "python", version)
    else:
        yield fail(ROOM, "python", version, f"install Python {_text(_OLDEST_PYTHON)} or newer")
    for requirement, purpose in (*((each, None) for each in REQUIRED), *OPTIONAL):
        yield _package(requirement, purpose)


def release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, for example (2, 11, 0) of ``2.11.0+cu130``, or () if there are none."""
    numbers: list[int] = []
    for part in version.split("."):
        match = re.match(r"\d+", part)
        if match is None:
            break
        numbers.append(int(match[0]))
        if match[0] != part:
            break
    return tuple(numbers)


def _package(requirement: Requirement, purpose: str | None) -> Check:
    """Check a package. ``purpose`` says what needs an optional one; None for one that training needs."""
    version, pip = _installed(requirement.name), f"pip install '{requirement.name}{requirement.range}'"
    if version is None:
        return _missing(requirement, "not installed", pip, purpose)
    if not requirement.admits(release(version)):
        return _missing(requirement, version, f"supported: {requirement.range}; {purpose or pip}", purpose)
    return ok(ROOM, requirement.name, version)


def _missing(requirement: Requirement, found: str, advice: str, purpose: str | None) -> Check:
    if purpose is None:
        return fail(ROOM, requirement.name, found, advice)
    return note(ROOM, requirement.name, found, purpose if found == "not installed" else advice)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(version: tuple[int, ...] | None) -> str:
    return ".".join(str(number) for number in version or ())

"""Checks the versions of required and optional packages. The packages are not imported."""

import platform
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from snip_megatron.megatron.startup import SUPPORTED
from snip_megatron.precision.errors import installed_version
from snip_megatron.tools.checks.check import Check, fail, note, ok

ROOM = "packages"
_OLDEST_PYTHON = (3, 12)

MEGATRON = Requirement(f"megatron-core{SUPPORTED}")
REQUIRED = (
    Requirement("torch>=2.8"),
    MEGATRON,
    *map(Requirement, ("ortools>=9.15,<10", "numpy>=2", "scipy>=1.14", "omegaconf>=2.3", "psutil>=6", "jinja2>=3")),
    Requirement("packaging>=24"),
)
EXTRAS = (
    (Requirement("transformers>=5"), "text", "--tokenizer-type HuggingFaceTokenizer"),
    (Requirement("tokenizers>=0.22"), "text", "snip prepare-data"),
    (Requirement("tqdm>=4.66"), "text", "snip prepare-data"),
    (Requirement("plotly>=6"), "report", "a report, snip compare or snip validate-proxy"),
    (Requirement("wandb>=0.22"), "wandb", "--wandb-project"),
    (Requirement("tensorboard>=2.19"), "tensorboard", "--tensorboard-dir"),
)
"""(Requirement, extra of snip_megatron that brings it, what needs it): what a training itself does not import."""
OPTIONAL = (
    (Requirement("triton>=3.4"), "the quantisation kernels of a GPU need it"),
    (
        Requirement("transformer-engine>=2.9"),
        "--transformer-impl transformer_engine needs it, and 2.19 the GEMMs of Blackwell",
    ),
    (Requirement("apex"), "never needed; Megatron's fused kernels use it where it is"),
    (Requirement("megatron-bridge>=0.6,<0.7"), "the Bridge callback needs it"),
    (
        Requirement("sgl-deep-gemm==0.1.4"),
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
        yield fail(ROOM, "python", version, f"install Python {'.'.join(map(str, _OLDEST_PYTHON))} or newer")
    yield from (_package(requirement, None) for requirement in REQUIRED)
    yield from (_package(requirement, purpose) for requirement, purpose in OPTIONAL)


def admits(requirement: Requirement, version: str) -> bool:
    """Whether a requirement's range includes a version. Release candidates and builds count as their release."""
    try:
        return requirement.specifier.contains(Version(version).base_version)
    except InvalidVersion:
        return not requirement.specifier


def _package(requirement: Requirement, purpose: str | None) -> Check:
    """Check a package. ``purpose`` says what needs an optional one; None for one that training needs."""
    name, pip = requirement.name, f"pip install '{requirement}'"
    version = installed_version(name)
    if version is None:
        return fail(ROOM, name, "not installed", pip) if purpose is None else note(ROOM, name, "not installed", purpose)
    if admits(requirement, version):
        return ok(ROOM, name, version)
    advice = f"supported: {requirement.specifier}; {purpose or pip}"
    return fail(ROOM, name, version, advice) if purpose is None else note(ROOM, name, version, advice)

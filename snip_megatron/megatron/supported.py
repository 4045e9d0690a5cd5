"""The supported releases of megatron-core. At its top this module imports nothing of Megatron."""

from __future__ import annotations

import re

from snip_megatron.errors import SnipError, quoted

OLDEST, BEYOND = (0, 19), (0, 20)
"""The first supported (major, minor) release, and the first one that is not supported any more."""

SUPPORTED = f">={OLDEST[0]}.{OLDEST[1]},<{BEYOND[0]}.{BEYOND[1]}"


def check_version(text: str) -> tuple[int, int]:
    """Return (major, minor) of a version such as ``0.19.0rc1+abc``. Raises SnipError if it is not supported."""
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise SnipError(f"megatron-core has version {quoted(text)}, which cannot be read; supported: {SUPPORTED}")
    version = int(match[1]), int(match[2])
    if not OLDEST <= version < BEYOND:
        raise SnipError(f"megatron-core {text} is installed; snip_megatron supports {SUPPORTED}")
    return version


def check_installed() -> tuple[int, int]:
    """Check the installed release before names are imported that another one may lack. Raises as check_version()."""
    from megatron.core.package_info import __version__

    return check_version(__version__)

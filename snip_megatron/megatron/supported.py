"""The supported releases of megatron-core. This module imports nothing, so that it works beside any release."""

from __future__ import annotations

OLDEST, BEYOND = (0, 19), (0, 20)
"""The first supported (major, minor) release, and the first one that is not supported any more."""

"""One server of warm ranks for all tests of a session that use it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from warm_ranks import WarmRanks


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmRanks]:
    server = WarmRanks()
    yield server
    server.close()

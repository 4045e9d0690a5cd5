"""The cluster of a session of tests, brought up once, or the reason why they are skipped. Each test ends its jobs."""

import os
from collections.abc import Iterator

import pytest
from cluster import CannotStart, Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """SNIP_REQUIRE_SLURM=1 makes a cluster that cannot be started an error."""
    try:
        running = Cluster()
    except CannotStart as reason:
        if os.environ.get("SNIP_REQUIRE_SLURM") == "1":
            raise
        pytest.skip(f"no SLURM here: {reason}")
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def no_jobs_left(cluster: Cluster) -> Iterator[None]:
    """A job that a failed test leaves would hold the nodes of the next ones."""
    yield
    cluster.run("scancel", "--me")

"""What starts ranks runs on one worker: two servers of ranks at once would fight for the cores."""

import os

import pytest

pytestmark = pytest.mark.xdist_group("commands")


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="needs pytest --numprocesses 3 --dist loadgroup")
def test_a_group_reaches_the_scheduler() -> None:
    """Workers send it as a suffix of the test's name; pytest 9.2 drops what pytest-xdist 3.8 appends."""
    assert os.environ["PYTEST_CURRENT_TEST"].split()[0].endswith("@commands")

"""Real torchrun starts ranks again on the store of the round before."""

from pathlib import Path

from launch import run_ranks


def test_ranks_started_again_find_nothing_of_those_before(tmp_path: Path) -> None:
    launcher = ("--standalone", "--max-restarts", "2")
    done = run_ranks(2, [], module="restarted_ranks", tmp=tmp_path, launcher=launcher)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("attempt 0 needed False old False of 2") == 2
    for attempt in (1, 2):  # the second would find what the first left
        said = f"restart {attempt} by torchrun, ranks meet under keys of their own"
        assert done.stdout.count(said) == 4  # said twice, done once
        assert done.stdout.count(f"attempt {attempt} needed True old False of 2") == 2

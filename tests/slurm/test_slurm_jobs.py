"""When a job is queued again and how it ends, on a real SLURM: script and agent, over ranks that do not compute."""

from pathlib import Path

import pytest
from cluster import Cluster
from job import Training


def test_a_job_that_slurm_preempts_without_a_grace_time_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    """SLURM queues the job again. With a grace time the script does, and after a lost node: test_slurm_training.py."""
    job = Training(cluster, tmp_path, sbatch="--partition=abrupt", stand_in={})
    job.wait_for_step(5)
    with job.preempted():
        job.wait_for_requeue()
    saved, count = job.saved, len(job.steps)
    assert saved > 0
    job.wait_for_step(saved + 1, after=count)
    assert min(job.steps_of_start(1)) == saved + 1
    cluster.run("scancel", job.number)
    assert job.wait_for_end()["JobState"] == "CANCELLED"


@pytest.mark.parametrize(
    ("requeue", "signal", "again"),
    [
        ("", ("--signal=TERM",), False),  # to the ranks: SLURM did not preempt the job
        ("always", ("--signal=TERM",), True),
        ("", ("--batch", "--signal=USR1"), True),
        ("never", ("--batch", "--signal=USR1"), False),
    ],
    ids=["term", "term-always", "usr1", "usr1-never"],
)
def test_who_is_queued_again(
    requeue: str, signal: tuple[str, ...], again: bool, cluster: Cluster, tmp_path: Path
) -> None:
    job = Training(cluster, tmp_path, environment={"SNIP_REQUEUE": requeue}, stand_in={})
    job.wait_for_step(5)
    cluster.run("scancel", *signal, job.number)
    if again:
        job.wait_for_requeue()
        assert f"at step {job.saved} of" in job.text
        cluster.run("scancel", job.number)
    else:
        record = job.wait_for_end()
        assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "0")
    assert job.saved > 0


def test_a_finished_training_is_not_queued_again(cluster: Cluster, tmp_path: Path) -> None:
    """The signal comes during the evaluation after the last step."""
    figures = {"steps": 5, "evaluate": 4}
    job = Training(cluster, tmp_path, environment={"SNIP_REQUEUE": "always"}, stand_in=figures)
    job.wait_for("the evaluation", lambda: "evaluating" in job.text)
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    record = job.wait_for_end()
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "0")
    assert "snip: SIGUSR1: the ranks save a checkpoint" in job.text


def test_a_failing_rank_ends_the_job_with_its_own_exit_code(cluster: Cluster, tmp_path: Path) -> None:
    """The rank of the other node waits for it without a handler of any signal."""
    job = Training(cluster, tmp_path, stand_in={"fail": 17}, environment={"SNIP_REQUEUE": "always"})
    record = job.wait_for_end()
    assert (record["JobState"], record["ExitCode"], record["Restarts"]) == ("FAILED", "17:0", "0")
    assert "snip launch: another node failed" in job.text
    assert "Killed" not in job.text


def test_a_time_limit_below_the_warning_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    job = Training(cluster, tmp_path, sbatch="--time=10", stand_in={})
    record = job.wait_for_end()
    assert (record["JobState"], record["ExitCode"], record["Restarts"]) == ("FAILED", "2:0", "0")
    (line,) = job.text.splitlines()
    assert line.startswith("slurm.sh: the time limit of 00:10:00 is not longer than the signal before its end")
    assert not job.steps


def test_a_job_that_would_train_one_step_a_start_is_not_queued_again(cluster: Cluster, tmp_path: Path) -> None:
    """The signal is there before the first step ends, as when the script was not told of an early one."""
    job = Training(cluster, tmp_path, stand_in={"hold": True})
    job.wait_for("the ranks", lambda: job.text.count("started") == 2)
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    record = job.wait_for_end()
    assert (record["JobState"], record["ExitCode"], record["Restarts"]) == ("FAILED", "1:0", "0")
    assert job.saved == 1
    assert "slurm.sh: SIGUSR1 came before a second step was trained and saved (step 0 at the start, 1 now)" in job.text

"""A training of real ranks under a real SLURM goes on after a lost node and after a preemption."""

from pathlib import Path

from cluster import NODES, Cluster
from job import Training

from snip_megatron.runtime.run_data import read_events, read_metrics


def test_a_training_goes_on_after_a_lost_node_and_a_preemption(cluster: Cluster, tmp_path: Path) -> None:
    """Three starts of one job. Far more steps than the test waits for: each start is ended.

    The first start loses a node before its first checkpoint: the second begins anew, and finds its events in the
    run directory. The nodes' names do not resolve. A data loader has workers, to which SLURM sends SIGTERM too.
    The script reads the time of the preemption, whatever format the user has chosen for times.
    """
    arguments = ("--train-iters", 100000, "--eval-iters", 0, "--num-workers", 1, "--save-interval", 100000)
    arguments += ("--snip-first-update", 2, "--snip-lag", 4)
    job = Training(cluster, tmp_path, *arguments, environment={"SLURM_TIME_FORMAT": "%a %H:%M"})
    job.wait_for("an adoption", lambda: '"adopt"' in events_text(job))
    cluster.lose(NODES[1])
    try:
        job.wait_for_requeue()
    finally:
        cluster.revive(NODES[1])
    assert job.saved == 0
    lines = len(job.steps)
    job.wait_for_step(12, after=lines)
    assert job.steps[lines] == 1
    assert read_events(job.save / "snip")[0]["event"] == "resume"
    with job.preempted():
        job.wait_for_requeue(2)
    first, lines = job.saved, len(job.steps)
    assert first > 10
    assert "the job is queued again (it was preempted)" in job.text
    assert "BrokenPipeError" not in job.text

    job.wait_for_step(first + 2, after=lines)
    assert job.steps[lines] == first + 1
    assert job.text.count("snip launch: goes on from the checkpoint in") == 2
    cluster.run("scancel", job.number)
    record = job.wait_for_end()
    assert (record["JobState"], record["Restarts"]) == ("CANCELLED", "2")
    run = job.save / "snip"
    assert [figure["step"] for figure in read_metrics(run)][:first] == list(range(first))
    assert any(event["event"] == "adopt" for event in read_events(run))


def events_text(job: Training) -> str:
    file = job.save / "snip" / "events.jsonl"
    return file.read_text() if file.exists() else ""


def test_a_wrong_argument_is_one_line_before_the_ranks_start(cluster: Cluster, tmp_path: Path) -> None:
    job = Training(cluster, tmp_path, "--tensor-model-parallel-size", 3)
    record = job.wait_for_end()
    assert (record["JobState"], record["ExitCode"]) == ("FAILED", "2:0")
    assert [line for line in job.text.splitlines() if "refuses" in line] == [
        "snip launch: Megatron refuses the arguments: world size (2) is not divisible by total_model_size"
        " (total_model_size=3)"
    ]
    assert "Traceback" not in job.text
    assert "[Gloo]" not in job.text

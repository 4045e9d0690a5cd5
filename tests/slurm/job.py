"""A training under ``launch/slurm.sh`` in a cluster: submitted as a user does, watched by its log and by SLURM."""

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster import NODES, Cluster

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "slurm.sh"
_PATIENCE_S = 400.0
_USER = {
    "PYTHONPATH": str(ROOT),
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "SNIP": f"{sys.executable} -m snip_megatron.tools.cli",
}


class Training:
    """A job of two nodes with one rank each.

    Args:
        cluster: The cluster.
        tmp: An empty folder.
        megatron: Arguments after ``--megatron``.
        sbatch: More arguments of sbatch.
        environment: Variables of the user who submits.
        stand_in: None for real ranks, else the figures for :mod:`stand_in`.
    """

    def __init__(
        self,
        cluster: Cluster,
        tmp: Path,
        *megatron: object,
        sbatch: str = "",
        environment: Mapping[str, str] | None = None,
        stand_in: Mapping[str, Any] | None = None,
    ) -> None:
        self.cluster, self.save = cluster, tmp / "save"
        variables = cluster.environment | _USER | {"SNIP_SBATCH": f"--time=60 {sbatch}"} | dict(environment or {})
        if stand_in is not None:
            program = Path(__file__).with_name("stand_in.py")
            variables |= {"SNIP": f"{sys.executable} {program}", "STAND_IN": json.dumps(stand_in)}
        command = ["bash", SCRIPT, "1b", "--smoke", "--cpu", "--nodes", 2, "--gpus-per-node", 1, "--save", self.save]
        command += ["--megatron", *megatron]
        submitted = subprocess.run(
            [str(word) for word in command], cwd=tmp, capture_output=True, text=True, timeout=120, env=variables
        )
        assert submitted.returncode == 0, submitted.stderr
        self.number = int(submitted.stdout.split()[-1])
        self.output = tmp / f"snip-{self.number}.log"

    @property
    def text(self) -> str:
        """What the job has printed, in all of its starts."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    @property
    def steps(self) -> list[int]:
        """The steps that were trained, as they were logged, in all starts."""
        return [int(step) for step in re.findall(r" iteration +(\d+)/", self.text)]

    def steps_of_start(self, start: int) -> list[int]:
        """The steps of a start, from 0, of ranks of the stand-in: each of the two prints "started" before its steps.

        Lines of an earlier start may arrive late, and do not count.
        """
        parts = self.text.split("started")[1 + 2 * start : 3 + 2 * start]
        return [int(step) for part in parts for step in re.findall(r" iteration +(\d+)/", part)]

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint; 0 without one."""
        file = self.save / "latest_checkpointed_iteration.txt"
        return int(file.read_text()) if file.exists() else 0

    @property
    def record(self) -> dict[str, str]:
        """What SLURM says about the job."""
        return self.cluster.job(self.number)

    def wait_for(self, what: str, met: Callable[[], bool]) -> None:
        """Wait until a condition is met. Raises AssertionError with the end of the log if it never is."""
        deadline = time.monotonic() + _PATIENCE_S
        while not met():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited for {what}: {self.record}\n{self.text[-6000:]}")
            time.sleep(0.2)

    def wait_for_step(self, step: int, after: int = 0) -> None:
        """Wait until ``step`` is trained, not counting the first ``after`` logged steps."""
        self.wait_for(f"step {step}", lambda: step in self.steps[after:] or self.ended)
        assert step in self.steps[after:], f"{self.record}\n{self.text[-6000:]}"

    @property
    def ended(self) -> bool:
        """Whether the job is over for good."""
        return self.record["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")

    def wait_for_end(self) -> dict[str, str]:
        """Wait until the job is over for good. Returns what SLURM says about it."""
        self.wait_for("the end", lambda: self.ended)
        return self.record

    def wait_for_requeue(self, times: int = 1) -> None:
        """Wait until the job has been queued again, and nothing of its last start is left."""
        self.wait_for(
            "being queued again",
            lambda: self.ended or (self.record["Restarts"], self.record["JobState"]) == (str(times), "PENDING"),
        )
        assert not self.ended, f"{self.record}\n{self.text[-6000:]}"

    @contextlib.contextmanager
    def preempted(self) -> Iterator[None]:
        """Have a more urgent job take the nodes; it is gone afterwards."""
        wish = ("--parsable", "--partition=urgent", "--exclusive", f"--nodes={len(NODES)}", "--output=/dev/null")
        number = self.cluster.run("sbatch", *wish, "--wrap=sleep 600").strip()
        try:
            yield
        finally:
            self.cluster.run("scancel", number)

"""Ranks forked from one process that has imported torch, Megatron and the entry: seconds less for each rank of a test.

What runs in a rank is the same as under torchrun: the module's ``main()`` with its command line and torchrun's
variables. :class:`WarmRanks` starts the server below (``python -m warm_ranks``) and sends it jobs, each a line of JSON.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from launch import cpu_environment, succeeded
from rank_process import free_port, read_help_of_options_once, run_as_rank

from snip_megatron.reporting import report
from snip_megatron.runtime import solving

PRELOADED = (
    "snip_megatron.pretrain_gpt",
    "snip_megatron.megatron.entry",
    "snip_megatron.megatron.setup",
    "snip_megatron.runtime.solving",
    # What a run imports on its way: half of the processor time of a training of ten steps.
    "megatron.core.datasets.helpers",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.models",
    "megatron.core.tokenizers.text.text_tokenizer",
    "ortools.sat.python.cp_model",
    "plotly.graph_objects",
    "plotly.graph_objs._figure",
    "snip_megatron.reporting.report",
    "snip_megatron.sensitivity.problem",
    "snip_megatron.solver.search",
)
"""Modules that the server imports before it forks ranks. Only Python that every process would run alike is in them."""
_GRACE = 20.0  # seconds for the other ranks to end after one has failed


class WarmRanks:
    """Runs jobs like :func:`launch.run_ranks`, and returns the same."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "warm_ranks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **cpu_environment()},
        )

    def run(
        self,
        nproc: int,
        args: Sequence[str],
        *,
        module: str = "snip_megatron.pretrain_gpt",
        timeout: float = 400,
        env: Mapping[str, str] | None = None,
        tmp: Path,
        grace: float = _GRACE,
    ) -> subprocess.CompletedProcess[str]:
        """``main()`` of ``module``, or ``function()`` of ``module:function``, on ``nproc`` ranks in the folder ``tmp``.

        Ranks that are still there after ``timeout`` seconds are killed: exit code 124.
        """
        tmp.mkdir(parents=True, exist_ok=True)
        job = {"nproc": nproc, "args": list(args), "module": module, "timeout": timeout, "env": dict(env or {})}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(job | {"tmp": str(tmp), "grace": grace}) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the server of warm ranks ended with exit code {self._server.wait()}")
        codes = json.loads(answer)
        out, err = ("".join((tmp / f"rank{r}.{kind}").read_text() for r in range(nproc)) for kind in ("out", "err"))
        return subprocess.CompletedProcess(list(args), next((c for c in codes if c), 0), out, err)

    def succeed(self, nproc: int, args: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a job as :meth:`run` does, and fail unless it ends well."""
        return succeeded(self.run(nproc, args, **options))

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=30)


def main() -> None:
    from snip_megatron.megatron.startup import prepare

    prepare([], [])
    for name in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):  # a release of Megatron may lack one
            importlib.import_module(name)
    read_help_of_options_once()
    report.page_template("report.html")
    for line in sys.stdin:
        codes = _run(json.loads(line))
        print(json.dumps(codes), flush=True)


def _run(job: dict[str, Any]) -> list[int]:
    port = free_port()
    pids = []
    for rank in range(job["nproc"]):
        pid = os.fork()
        if pid == 0:
            _become_rank(job, rank, port)
        pids.append(pid)
    return _wait(pids, time.monotonic() + job["timeout"], job["grace"])


def _become_rank(job: dict[str, Any], rank: int, port: int) -> None:
    def prepare() -> None:
        os.chdir(job["tmp"])
        for descriptor, kind in ((0, None), (1, "out"), (2, "err")):
            path = os.devnull if kind is None else f"rank{rank}.{kind}"
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)
        world = str(job["nproc"])
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **job["env"]}
        _separate_wandb_media()
        if "WHOLE_MOCK_DATA" not in job["env"]:
            _shorten_mock_data()
        solving.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": ForkedSolver})

    run_as_rank(job["module"], job["args"], prepare)


class ForkedSolver(subprocess.Popen[bytes]):
    """The solver process as a fork of its rank, which has imported what the process otherwise imports for seconds."""

    started: ClassVar[list["ForkedSolver"]] = []

    def __init__(self, command: list[str], *, env: dict[str, str], **_: Any) -> None:
        jobs, answers = os.pipe(), os.pipe()
        self.args, self.returncode, self.stderr, self._child_created = command, None, None, True
        self._waitpid_lock = threading.Lock()
        self.text_mode, self._communication_started, self._input = None, False, None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.dup2(jobs[0], 0)
                os.dup2(answers[1], 1)
                os.closerange(3, 1 << 16)  # the rank's connections end with the rank
                os.environ.clear()
                os.environ.update(env)
                gc.freeze()  # what the rank holds is not this process's to destroy
                code = solving.main(*command[-2:])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        self.started.append(self)
        os.close(jobs[0])
        os.close(answers[1])
        self.stdin, self.stdout = os.fdopen(jobs[1], "wb"), os.fdopen(answers[0], "rb")


def _shorten_mock_data() -> None:
    """Megatron's mock data set has 100,000 documents, which take longer to shuffle than a test takes to train."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = 1000


def _separate_wandb_media() -> None:
    """wandb stages tables in a folder made when it is imported, here in the server, and removed when a rank ends."""
    if private := sys.modules.get("wandb.sdk.data_types._private"):
        private.MEDIA_TMP.name = tempfile.mkdtemp(suffix="wandb-media")


def _wait(pids: list[int], deadline: float, grace: float) -> list[int]:
    """Return the exit codes. A moment after one rank fails, the others, which may wait for it, are ended."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid in codes:
                continue
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid]:
                    deadline = min(deadline, time.monotonic() + grace)
        if time.monotonic() > deadline:
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = 124
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    main()

"""A real SLURM of two nodes on this machine, without root and without systemd.

One ``slurmctld``, two ``slurmd`` and one ``munged`` run as the calling user, on ports of their own, in a folder of
their own. The names of the nodes do not resolve: jobs must use the address that SLURM gives for a node.
"""

import contextlib
import getpass
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
NODES = ("snip-a", "snip-b")
#: Seconds from SIGTERM to SIGKILL for a job that is cancelled, or preempted without GraceTime.
KILL_WAIT = 30
#: A job that is queued again becomes eligible one second after its credential expires; SLURM's default is 2 minutes.
CREDENTIAL_S = 5
_START_S = 30.0
_GPUS = 2

_CONFIGURATION = """
ClusterName=snip
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={credential_s}
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
PlugStackConfig={folder}/plugstack.conf
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait={kill_wait}
SlurmdTimeout=10
ReturnToService=2
GresTypes=gpu
NodeName=DEFAULT CPUs=2 Boards=1 SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=1000 Gres=gpu:{gpus}
{nodes}
PartitionName=DEFAULT Nodes=ALL MaxTime=120 DefaultTime=120 State=UP
PartitionName=graceful PriorityTier=1 PreemptMode=REQUEUE GraceTime=120 Default=YES
PartitionName=abrupt PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=urgent PriorityTier=9 PreemptMode=OFF
"""


class CannotStart(Exception):
    """The cluster cannot be started on this machine. The message says why, in one line."""


class Cluster:
    """A running cluster. ``environment`` makes SLURM's commands talk to it.

    Raises:
        CannotStart: If a program is missing, or if the daemons do not come up.
    """

    def __init__(self) -> None:
        missing = [name for name in PROGRAMS if _program(name) is None]
        if missing:
            raise CannotStart(f"not installed: {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)")
        # The path of a socket has at most 107 characters, which pytest's folders may exceed.
        self.folder = Path(tempfile.mkdtemp(prefix="snip-slurm-"))
        self.environment = _clean_environment() | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._ports = dict(zip(NODES, _free_ports(len(NODES)), strict=True))
        try:
            self._configure()
            self._start()
            self._try_a_job()
        except (OSError, subprocess.TimeoutExpired) as error:
            self.stop()
            raise CannotStart(" ".join(str(error).split())) from error
        except BaseException:
            self.stop()
            raise

    def run(self, *command: object, timeout: float = 60) -> str:
        """Run one of SLURM's commands. Returns its output; raises AssertionError with what it said if it fails."""
        process = self.attempt(*command, timeout=timeout)
        assert process.returncode == 0, f"{command}: {process.stdout}{process.stderr}"
        return process.stdout

    def attempt(self, *command: object, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run one of SLURM's commands, which may fail."""
        return subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=self.environment,
            stdin=subprocess.DEVNULL,
        )

    def job(self, number: int) -> dict[str, str]:
        """Return what SLURM says about a job."""
        words = self.run("scontrol", "show", "job", "--oneliner", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def lose(self, node: str) -> None:
        """Kill a node's daemon and all that it runs, and have SLURM notice at once instead of after its time-out."""
        daemon = psutil.Process(int((self.folder / f"slurmd.{node}.pid").read_text()))
        _kill([daemon, *self._processes(node)])
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def revive(self, node: str) -> None:
        """Start the daemon of a lost node again, and wait until SLURM uses the node."""
        self._daemon("slurmd", "-N", node, "-f", self.environment["SLURM_CONF"])
        self._wait_until_idle()

    def stop(self) -> None:
        """End all jobs and daemons, and remove the folder."""
        daemons = {process for process in psutil.process_iter() if _mentions(process, self.folder)}
        _kill(self._processes() | daemons)  # found before any is killed: a step's daemon is known by its children
        shutil.rmtree(self.folder, ignore_errors=True)

    def _processes(self, node: str | None = None) -> set[psutil.Process]:
        """All processes of jobs, on one node or on all. Each but SLURM's own inherits the name of its node."""
        result: set[psutil.Process] = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                if environment.get("SLURM_CONF") != self.environment["SLURM_CONF"]:
                    continue
                if "SLURMD_NODENAME" in environment and node in (None, environment["SLURMD_NODENAME"]):
                    parents = process.parents()
                    result |= {process, *(each for each in parents if each.name().startswith("slurmstepd"))}
        return result

    def _configure(self) -> None:
        folder = self.folder
        folder.chmod(0o755)
        (folder / "state").mkdir()
        (folder / "plugstack.conf").touch()
        devices = folder / "devices"
        devices.mkdir()
        for number in range(_GPUS):  # SLURM says in its log that these are no devices, and counts them
            (devices / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={devices}/gpu[0-{_GPUS - 1}]\n")
        if _version() >= (23, 11):
            (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        nodes = [
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port}"
            for name, port in self._ports.items()
        ]
        text = _CONFIGURATION.format(
            folder=folder,
            controller_port=_free_ports(1)[0],
            user=getpass.getuser(),
            credential_s=CREDENTIAL_S,
            kill_wait=KILL_WAIT,
            gpus=_GPUS,
            nodes="\n".join(nodes),
        )
        (folder / "slurm.conf").write_text(text)
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)

    def _start(self) -> None:
        folder, configuration = self.folder, self.environment["SLURM_CONF"]
        files = {"key": "munge.key", "pid": "munged.pid", "log": "munged.log", "seed": "munged.seed"}
        named = [f"--{what}-file={folder / name}" for what, name in files.items()]
        self._daemon("munged", "--force", f"--socket={folder / 'munge.socket'}", *named)
        self._daemon("slurmctld", "-c", "-f", configuration)
        for node in NODES:
            self._daemon("slurmd", "-N", node, "-f", configuration)
        self._wait_until_idle()

    def _try_a_job(self) -> None:
        """A machine may let the daemons run and still forbid what they need for a job."""
        whole = ("--wait", f"--nodes={len(NODES)}", "--gpus-per-node=1", "--output=/dev/null", "--chdir=/")
        process = self.attempt("sbatch", *whole, "--wrap=srun true")
        if process.returncode:
            said = " ".join((process.stdout + process.stderr).split())
            raise CannotStart(f"a job of two nodes fails: {said} {self._last_errors()}")

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + _START_S
        while set(result := self.attempt("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()) != {"idle"}:
            if time.monotonic() > deadline:
                raise CannotStart(f"nodes are {result or 'unknown'} after {_START_S:g} s: {self._last_errors()}")
            time.sleep(0.2)

    def _daemon(self, name: str, *arguments: str) -> None:
        """Start a daemon, which leaves to the background by itself."""
        program = _program(name)
        assert program is not None
        log = self.folder / f"{name}.start"
        with log.open("ab") as output:  # no pipe: the daemon may keep it open
            try:
                process = subprocess.run(
                    [program, *arguments], stdout=output, stderr=output, stdin=subprocess.DEVNULL,
                    env=self.environment, timeout=_START_S, cwd=self.folder,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                raise CannotStart(f"{name} does not start: no end in {_START_S:g} s") from None
        if process.returncode:
            raise CannotStart(f"{name} does not start: {' '.join(log.read_text().split())[-300:]}")

    def _last_errors(self) -> str:
        lines = [
            line
            for log in sorted(self.folder.glob("*.log"))
            for line in log.read_text(errors="replace").splitlines()
            if re.search(r"error|fatal", line, re.IGNORECASE)
        ]
        return " | ".join(lines[-4:])[-600:]


def _program(name: str) -> str | None:
    """Daemons are often in folders that are not in a user's PATH."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def _version() -> tuple[int, int]:
    program = _program("slurmctld")
    assert program is not None
    result = re.search(r"(\d+)\.(\d+)", subprocess.run([program, "-V"], capture_output=True, text=True).stdout)
    return (int(result[1]), int(result[2])) if result else (0, 0)


def _clean_environment() -> dict[str, str]:
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    ours = ("SLURM_", "SBATCH_", "SRUN_", "SNIP_", "TORCHELASTIC_")
    return {k: v for k, v in os.environ.items() if k not in ranks and not k.startswith(ours)}


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _mentions(process: psutil.Process, folder: Path) -> bool:
    try:
        return str(folder) in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()

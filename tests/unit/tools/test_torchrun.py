"""One node's torchrun: its command; which processes a signal reaches."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from snip_megatron.precision.errors import SnipError
from snip_megatron.tools import torchrun

REPOSITORY = Path(__file__).resolve().parents[3]


def command_of(nodes: int, rendezvous: str | None, local_address: str | None = None) -> list[str]:
    return torchrun.torchrun_command(nodes, 8, rendezvous, "77.1", local_address)


def test_one_node_and_several() -> None:
    assert command_of(1, None)[-3:] == ["--standalone", "-m", torchrun.ENTRY]
    several = command_of(8, "node0:29500", "10.0.0.3")
    assert several[3:7] == ["--nnodes", "8", "--nproc-per-node", "8"]
    assert several[-10:-2] == [
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29500", "--rdzv-id", "77.1", "--local-addr", "10.0.0.3")
    ]
    for wrong in (None, "node0", "node0:", ":x"):
        with pytest.raises(SnipError, match="--nodes 8: give --rendezvous HOST:PORT, the same on every node"):
            command_of(8, wrong)


def test_torchrun_knows_the_arguments() -> None:
    """The installed torchrun accepts all arguments, and gets ``--signals-to-handle`` if it has it."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    command = command_of(8, "node0:29500", "127.0.0.1")
    args = parser.parse_args([*command[3:-2], "script.py"])
    assert (args.nnodes, args.nproc_per_node, args.max_restarts, args.rdzv_id) == ("8", "8", 0, "77.1")
    assert ("--signals-to-handle" in command) == ("--signals-to-handle" in parser.format_help())


def test_a_node_without_enough_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(SnipError, match="--gpus-per-node 8: this node has 4 GPUs"):
        torchrun.check_devices(8)
    torchrun.check_devices(4)


# A launcher with a rank that needs its time after SIGTERM, a helper of the rank that dies of it, and another process.
LAUNCHER = """
import os, signal, subprocess, sys, time
print("started", flush=True)
rank = "import os, signal, subprocess, sys, time; asked = []; time.sleep(1); " \\
    "signal.signal(signal.SIGTERM, lambda *a: asked.append(1)); " \\
    "helper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); " \\
    "print('ready', flush=True);\\n" \\
    "while not asked: time.sleep(0.05)\\n" \\
    "assert helper.poll() is None; helper.kill(); print('saved', flush=True)\\n" \
    "signal.signal(signal.SIGTERM, signal.SIG_DFL); time.sleep(1)"
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
code = subprocess.run([sys.executable, "-c", rank, "-m", "ENTRY"]).returncode
assert other.poll() is None; other.kill()
sys.exit(code)
"""
SUPERVISOR = """
import sys
from snip_megatron.tools.torchrun import supervise
print(supervise([sys.executable, "-c", sys.argv[1]], {"ADDED": "1"}), flush=True)
"""


ENVIRONMENT = os.environ | {"PYTHONPATH": str(REPOSITORY)}


def supervisor(command: list[str]) -> subprocess.Popen[str]:
    """Start a command in a session of its own."""
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True)


@pytest.mark.parametrize(
    ("number", "early"),
    [(signal.SIGUSR1, True), (signal.SIGTERM, False)],
    ids=["usr1-before-the-ranks-are-ready", "term"],
)
def test_a_signal_to_all_processes_ends_the_ranks_only(number: signal.Signals, early: bool) -> None:
    """Schedulers send it to the whole group. The launcher and the rank's helper must not die of SIGUSR1."""
    launcher = textwrap.dedent(LAUNCHER).replace("ENTRY", torchrun.ENTRY)
    # It heeds the signal, also if the tests ignore it, as under nohup.
    heeds = f"import os, signal, sys; signal.signal({int(number)}, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    process = supervisor([sys.executable, "-c", heeds, sys.executable, "-c", SUPERVISOR, launcher])
    try:
        assert process.stdout.readline() == "started\n"
        if not early:  # else the rank still ignores what is sent
            assert process.stdout.readline() == "ready\n"
        if number is signal.SIGTERM:
            process.send_signal(number)  # helpers without a handler would die of it, here as anywhere
        else:
            os.killpg(process.pid, number)
        out, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert out.splitlines()[-2:] == ["saved", f"(0, '{number.name}')"]


def test_nohup() -> None:
    """A hangup that is ignored when the job starts does not end it."""
    hangup = "import os, signal, time; os.kill(os.getppid(), signal.SIGHUP); time.sleep(0.5)"
    command = ["nohup", sys.executable, "-c", SUPERVISOR, hangup]
    process = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert process.stdout == "(0, None)\n", process.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT], ids=lambda number: number.name)
def test_a_key_that_ends_a_program_ends_the_ranks_through_torchrun(number: signal.Signals) -> None:
    """The terminal sends it to the whole group, which has no ranks. torchrun ends them, and we wait for it."""
    stand_in = "import signal, sys, time; asked = []; signal.signal(NUMBER, lambda *a: asked.append(1)); " \
        "print('started', flush=True);\nwhile not asked: time.sleep(0.05)\ntime.sleep(0.5); sys.exit(3)"  # fmt: skip
    process = supervisor([sys.executable, "-c", SUPERVISOR, stand_in.replace("NUMBER", str(int(number)))])
    assert process.stdout.readline() == "started\n"
    os.killpg(process.pid, number)
    assert process.communicate(timeout=60)[0] == "(3, None)\n"
    command = command_of(8, "node0:29500")
    assert number.name in command[command.index("--signals-to-handle") + 1].split(",")


def test_exit_codes() -> None:
    before = signal.getsignal(signal.SIGTERM)
    leave = [sys.executable, "-c", "import os; os._exit(int(os.environ['CODE']))"]
    assert torchrun.supervise(leave, {"CODE": "7"}) == (7, None)
    killed = torchrun.supervise([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], {})
    assert killed == (128 + 9, None)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_exit_code_of_a_rank_and_what_other_nodes_read(tmp_path: Path) -> None:
    """torchrun ends with 1, whatever the code of the rank was."""
    failed = tmp_path / "not made yet" / "failed"
    stand_in = "from snip_megatron.megatron.startup import note_exit_code; note_exit_code(17); raise SystemExit(1)"
    assert torchrun.supervise([sys.executable, "-c", stand_in], {"PYTHONPATH": str(REPOSITORY)}, failed) == (17, None)
    assert failed.read_text() == "17\n"
    second = [sys.executable, "-c", "raise SystemExit(3)"]
    assert torchrun.supervise(second, {}, failed) == (3, None)
    assert failed.read_text() == "17\n"  # the first one's


def test_a_node_ends_at_once_when_another_has_failed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The rank has no handler, and does not end by itself."""
    failed = tmp_path / "failed"
    failed.write_text("17\n")
    waiting = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)"
    assert torchrun.supervise([sys.executable, "-c", waiting], {}, failed) == (17, "SIGTERM")
    assert f"snip launch: another node failed ({failed})" in capfd.readouterr().out


def test_the_address_on_the_route_to_the_rendezvous() -> None:
    command = command_of(8, "127.0.0.1:29500", torchrun.ROUTE)
    assert command[command.index("--local-addr") + 1] == "127.0.0.1"
    with pytest.raises(SnipError, match="cannot be reached from this node"):
        command_of(8, "no.such.host.invalid:29500", torchrun.ROUTE)

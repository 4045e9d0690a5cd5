"""Every command of README.md and docs/quickstart.md, copied out of them and run in a folder of a newcomer.

A block of bash is run, line after line, unless a comment before it says otherwise:
``<!-- test: elsewhere TEST SCRIPT -->`` names the test that runs SCRIPT;
``<!-- test: parse -->`` is for commands that need a GPU: their arguments are parsed.
"""

import argparse
import importlib
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from snip_megatron.runtime.account import duration
from snip_megatron.runtime.run_data import read_events
from snip_megatron.tools.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/quickstart.md")
STEPS = "10"  # one update is adopted by then: the first is due at step 4, with a lag of 4


@dataclass(frozen=True)
class Block:
    page: str
    directive: tuple[str, ...]
    lines: tuple[str, ...]


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    result = re.findall(r"(?:<!-- test: ([^>]*) -->\n)?```bash\n(.*?)```", text, re.DOTALL)
    assert len(result) == text.count("```bash"), page
    return [Block(page, tuple(d.split()), tuple(c.replace("\\\n", " ").splitlines())) for d, c in result]


ALL = [block for page in PAGES for block in blocks(page)]


def test_there_are_commands():
    assert {block.page for block in ALL} == set(PAGES)
    assert {block.directive[:1] for block in ALL} == {(), ("elsewhere",), ("parse",)}


@pytest.mark.parametrize("block", [b for b in ALL if b.directive[:1] == ("elsewhere",)], ids=lambda b: b.lines[0][:25])
def test_what_another_test_runs_is_run_there(block):
    _, test, script = block.directive
    (line,) = block.lines
    command, script_of_line = shlex.split(line, comments=True)
    assert command == "bash"
    assert (ROOT / script_of_line).is_file()
    assert Path(script).name in (ROOT / test).read_text()
    # scripts/test.sh is what runs this test: its first line of work is the script that the other test runs.
    assert script == script_of_line or script in (ROOT / script_of_line).read_text()


@pytest.mark.parametrize("block", [b for b in ALL if b.directive == ("parse",)], ids=lambda b: b.lines[0][:25])
def test_what_needs_a_gpu_is_parsed(block):
    for line in block.lines:
        program, name, *arguments = shlex.split(line, comments=True)
        assert program == "snip"
        parser = argparse.ArgumentParser(exit_on_error=False)
        importlib.import_module(COMMANDS[name][0]).add_arguments(parser)
        parser.parse_args(arguments)


@pytest.fixture
def newcomer(tmp_path, monkeypatch) -> Path:
    """A folder with the scripts and the pages; torchrun and snip are those of this environment."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, module in (("torchrun", "torch.distributed.run"), ("snip", "snip_megatron.tools.cli")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (programs / "python").symlink_to(sys.executable)
    home = tmp_path / "home"
    for folder in ("docs", "launch", "scripts"):
        shutil.copytree(ROOT / folder, home / folder)
    quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore", "STEPS": STEPS}
    path = os.pathsep.join((str(programs), os.environ["PATH"]))
    for name, value in (quiet | {"PATH": path, "PYTHONPATH": str(ROOT), "SNIP_VENV": sys.prefix}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(home)
    return home


def run(line: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and output. ``snip`` runs in this process, which has imported torch already.

    ``snip doctor`` imports Megatron and patches torch for the CPU, so that it gets a process of its own.
    """
    words = shlex.split(line, comments=True)
    if words[0] == "snip" and words[1] != "doctor":
        code = main(words[1:])
    else:
        code = subprocess.run(["bash", "-c", line], stdin=subprocess.DEVNULL, timeout=300, check=False).returncode
    out, err = capfd.readouterr()
    return code, out + err


def test_a_newcomers_path(newcomer, capfd):
    outputs: dict[str, str] = {}
    for line in [line for block in ALL if not block.directive for line in block.lines]:
        code, output = run(line, capfd)
        outputs[line] = output
        if line.startswith("snip doctor"):
            assert code in (0, 1), output  # 1: what it found on this machine, in the right form
            assert "CP-SAT proved a small optimum" in output
        else:
            assert code == 0, f"{line}\n{output[-4000:]}"
    assert [event["step"] for event in read_events("runs/mine") if event["event"] == "adopt"] == [8]
    for file in ("runs/mine/report.html", "map.json", "recipes/stage_0.yaml"):
        assert Path(file).is_file(), file
    assert list(Path("runs/tensorboard").glob("events.*"))
    assert not Path("checkpoints/1b").exists()  # only a dry run
    assert_worth(outputs)


def assert_worth(outputs: dict[str, str]) -> None:
    """The training on the CPU ends by saying what the report says: speed is not judged, the rest is there."""
    (training,) = [output for line, output in outputs.items() if line.startswith("torchrun")]
    (figures,) = [json.loads(output) for line, output in outputs.items() if line == "snip report runs/mine --json"]
    assert (figures["verdict"], figures["steps"], figures["total_steps"]) == ("not judged", int(STEPS), int(STEPS))
    assert "snip: Worth it: not judged. Formats are emulated on cpu" in training
    assert re.search(r"^snip: map 1, 7\d% fp4, 2\d% fp8 \| measuring steps$", training, re.MULTILINE)
    assert "Worth it: not judged." in Path("runs/mine/report.html").read_text(encoding="utf-8")
    assert figures["updates"] == 1
    assert f"snip: 1 update cost {duration(figures['cost_s'])}" in training
    assert figures["loss"]["nats"] > 0
    assert 2**26 < figures["memory"]["before"] <= figures["memory"]["peak"]
    assert [(each["begin"], each["end"]) for each in figures["maps"]] == [(0, 8), (8, int(STEPS))]

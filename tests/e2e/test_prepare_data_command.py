"""`snip prepare-data` as a user runs it."""

import json
import signal
import subprocess
import time
from pathlib import Path

from signals import heeding
from snip_command import ROOT, SNIP, snip, snip_alone


def test_the_standard_library_is_prepared(tmp_path: Path) -> None:
    output = tmp_path / "data"
    given = "--glob json/*.py --glob email/*.py --tokenizer bytes --holdout 0.2"
    made = snip_alone("prepare-data", "--output", output, *given.split())
    assert made.returncode == 0, made.stderr
    assert "tokenizing train: 100%" in made.stderr
    assert "Traceback" not in made.stderr
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["train"]["tokens"] == manifest["train"]["bytes"] + manifest["train"]["files"]
    assert f"unigram entropy of the hold-out: {manifest['valid']['unigram_entropy_nats']:.4f}" in made.stdout
    last = made.stdout.splitlines()[-1]
    assert f"--train-data-path {output}/train --valid-data-path {output}/valid" in last
    assert f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {output}/tokenizer" in last


def test_a_stop_leaves_nothing_behind(tmp_path: Path) -> None:
    number = signal.SIGHUP
    output = tmp_path / "made" / "data"
    command = heeding(number, [*SNIP, "prepare-data", "--output", str(output), "--tokenizer", "bytes"])
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while not list(tmp_path.glob("made/.*")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        _, error = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert "Traceback" not in error
    assert list(output.parent.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """The folder of a process that still runs stays."""
    output = tmp_path / "data"
    command = [*SNIP, "prepare-data", "--output", str(output), "--tokenizer", "bytes"]
    small = (*command[3:], "--glob", "json/*.py", "--overwrite")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not list(tmp_path.glob(".data.*/new")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGSTOP)
        (left,) = tmp_path.glob(".data.*")
        assert snip(*small).returncode == 0
        assert left.exists()
        process.kill()
    assert snip(*small).returncode == 0
    assert list(tmp_path.iterdir()) == [output]

"""Megatron with SNIP's hook in its source (patches/): the same bits as with the hook put in at run time."""

import shlex
import subprocess
from pathlib import Path

import pytest
from installed import copy_installed
from launch import REPOSITORY, cpu_environment, run_alone, tiny_llama_args
from layouts import figures
from rank_process import free_port
from warm_ranks import WarmRanks

from snip_megatron.runtime.run_data import read_events

STEPS = 8
SNIP = shlex.split(
    "--num-layers 2 --snip --snip-first-update 2 --snip-update-interval 100 --snip-lag 2 --snip-wait 120"
    " --snip-eval both"
)


def arguments(run: Path, *extra: str) -> list[str]:
    # A validation in between: the second hook.
    return tiny_llama_args(
        *SNIP, "--snip-dir", str(run), "--eval-iters", "1", "--eval-interval", "5", *extra, iters=STEPS
    )


def record(run: Path) -> tuple[list[tuple[int, float, float]], list[object]]:
    """Losses of steps and of validations, and adoptions."""
    fields = ("step", "event", "formats", "loss", "version", "fp4_fraction")
    events = [
        {k: event.get(k) for k in fields} for event in read_events(run) if event["event"] in ("adopt", "validation")
    ]
    return figures(run), events


def test_bitwise_the_run_time_way(tmp_path: Path, warm: WarmRanks) -> None:
    vendored = copy_installed(tmp_path / "vendored")
    applied = subprocess.run(
        ["/bin/bash", str(REPOSITORY / "scripts" / "apply_patches.sh"), str(vendored)], capture_output=True, text=True
    )
    if applied.returncode == 2 and "not the file of a released" in applied.stderr:
        pytest.skip("the installed megatron-core is not one of the releases that have a diff")
    assert applied.returncode == 0, applied.stderr

    environment = {
        "PYTHONPATH": f"{vendored}:{cpu_environment()['PYTHONPATH']}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    # Off by name: a patch at run time would refuse to start.
    patched = run_alone(arguments(tmp_path / "patched", "--snip-no-compat", "step-hook"), tmp=tmp_path, env=environment)
    assert patched.returncode == 0, patched.stderr[-4000:]
    assert "compat: step-hook" not in patched.stdout

    whole = {"WHOLE_MOCK_DATA": "1"}
    released = warm.succeed(1, arguments(tmp_path / "released"), tmp=tmp_path / "ranks", env=whole)
    assert "compat: step-hook: Megatron's train_step and evaluate wrapped at run time" in released.stdout

    steps, events = record(tmp_path / "patched")
    assert len(steps) == STEPS
    assert {event["event"] for event in events} == {"adopt", "validation"}  # both hooks ran
    assert (steps, events) == record(tmp_path / "released")

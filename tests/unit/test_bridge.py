"""Megatron Bridge's interface against what snip_megatron.bridge takes it for; skipped where Bridge is not installed."""

import dataclasses
import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.run_data import load_run

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "bridge_pretrain.py"
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def installed() -> bool:
    try:
        importlib.import_module("megatron.bridge.training.train")
    except ImportError:
        return False
    return True


@pytest.fixture(scope="module")
def bridge() -> Any:
    if not installed():
        pytest.skip("Megatron Bridge is not installed")
    return importlib.import_module("snip_megatron.bridge")


def test_says_what_is_missing() -> None:
    if installed():
        pytest.skip("Megatron Bridge is installed")
    with pytest.raises(SnipError, match=r"needs megatron-bridge 0\.6.*No module named 'megatron\.bridge'"):
        importlib.import_module("snip_megatron.bridge")


def test_the_loop_is_known(bridge: Any) -> None:
    bridge.bridge_compat.check_interface()
    pretrain = importlib.import_module("megatron.bridge.training.pretrain").pretrain
    assert list(inspect.signature(inspect.unwrap(pretrain)).parameters) == ["config", "forward_step_func", "callbacks"]


def test_a_changed_step_is_refused(bridge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def train_step(model: Any, data_iterator: Any) -> None: ...

    monkeypatch.setattr(bridge.bridge_compat.train, "train_step", train_step)
    with pytest.raises(SnipError, match="train_step"):
        bridge.SnipCallback()


def test_a_whole_configuration_is_taken_as_it_is(bridge: Any) -> None:
    config = SnipConfig(enabled=True, budget="fp4=0.5")
    assert bridge.SnipCallback(config)._snip is config
    assert bridge.SnipCallback(SnipConfig()).attach(object()) is not None  # SNIP is off: nothing is touched
    with pytest.raises(SnipError, match="or options, not both: lag"):
        bridge.SnipCallback(config, lag=3)


def test_events_exist(bridge: Any) -> None:
    callbacks = importlib.import_module("megatron.bridge.training.callbacks")
    events = {name for name in vars(bridge.SnipCallback) if name.startswith("on_")}
    assert events
    assert events <= callbacks.VALID_EVENTS
    assert "total_loss_dict" in {field.name for field in dataclasses.fields(callbacks.CallbackContext)}


def test_the_example_trains(bridge: Any, tmp_path: Path) -> None:
    """A real job of Bridge's on one rank over gloo: its model is converted, and a map is adopted."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(EXAMPLE)]
    command += ["--steps", "5", "--snip", "--snip-budget", "fp4=0.5", "--snip-first-update", "2", "--snip-lag", "1"]
    command += ["--snip-update-interval", "8", "--snip-wait", "100", "--snip-dir", str(tmp_path / "run")]
    process = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False)
    assert process.returncode == 0, process.stderr[-4000:]
    run = load_run(tmp_path / "run")
    assert [adoption.step for adoption in run.adoptions] == [3]
    assert run.adoptions[0].precision_map.achieved >= 0.5
    assert list(run.validations()["map"]) == [5]

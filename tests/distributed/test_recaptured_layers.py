"""Some layers are captured anew by Megatron's own helper. What it captures, and whether bits stay: tests/gpu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def test_megatrons_helper_captures_the_chosen_layers_beside_the_others() -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", FOLDER / "recaptured_layers.py"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    whole, some, again = found["calls"]
    assert (whole["layers"], some["layers"], again["layers"]) == ([1, 2, 3, 4, 5, 6], [2, 5], [1, 2, 3, 4, 5, 6])
    assert (whole["_num_layers_per_chunk"], some["_num_layers_per_chunk"]) == ([6], [2])
    assert whole["_order"] == some["_order"] == [1, -1]
    assert some["samples"] == [["attention_mask", "rotary_pos_emb"]] * 2
    assert (some["num_warmup_iters"], again["num_warmup_iters"]) == (1, 1)
    assert found["captured"] == [[1, 2, 1, 1, 2, 1], [3] * 6]
    assert found["live"] == [True, False, True, True, False, True]
    assert found["made"]
    assert found["layers"] == 6 + 2, "of the first capture and of the second"

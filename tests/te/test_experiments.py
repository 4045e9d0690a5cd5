"""Experiments on mixtures: Megatron and SNIP accept their runs, and the planned share is that of NVIDIA's list."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch  # noqa: F401  Transformer Engine needs torch's libraries

pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)

from benchmarks.quality.experiment import load_experiment
from benchmarks.quality.models import Data
from benchmarks.quality.runs import experiment_runs
from snip_megatron.planner.layout import Layout
from snip_megatron.precision import fp4_fraction
from snip_megatron.runtime.config import parse_snip_arguments, resolve_arguments
from snip_megatron.runtime.options import parse_pins
from snip_megatron.sensitivity.policies import fixed_map
from snip_megatron.tools.argument_check import check_arguments

EXPERIMENTS = Path(__file__).resolve().parents[2] / "benchmarks/quality/experiments"
ELSEWHERE = ("train-data-path", "valid-data-path", "tokenizer-type", "tokenizer-model", "load", "ckpt-step")
"""Arguments that name a text or a checkpoint, each with a value."""


@pytest.mark.parametrize("name", ["hybrid", "mla_small", "moe_small"])
def test_the_least_budget_is_the_share_of_nvidias_list(name: str) -> None:
    data = Data(Path("/data"), "bytes", "d" * 64, 10**8, 10**6)
    runs = experiment_runs(load_experiment(EXPERIMENTS / f"{name}.json"), data)
    words = list(next(run.arguments for run in runs if run.label == "nemotron"))
    for argument in ELSEWHERE:
        at = words.index(f"--{argument}")
        del words[at : at + 2]
    layout = check_arguments(
        [*words, "--tokenizer-type", "NullTokenizer", "--vocab-size", "256", "--mock-data"], 1, {}
    ).layout
    assert isinstance(layout, Layout), layout
    config = resolve_arguments(parse_snip_arguments(words))
    flops = {row.name: row.flops for row in layout.model.rows}
    nvidias = fixed_map(config.policy, flops, parse_pins(config.pin), config.formats)
    assert nvidias is not None
    least = min(run.budget for run in runs if run.budget is not None)
    assert fp4_fraction(nvidias, flops) == pytest.approx(least, abs=1e-3)

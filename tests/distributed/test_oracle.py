"""The oracle through the real entry is exact against options forced alone by a static map."""

import json
import shlex
from pathlib import Path

import pytest
from launch import tiny_llama_args
from warm_ranks import WarmRanks

from benchmarks.quality.truth import load_truth
from benchmarks.quality.warm import MEASURED
from snip_megatron.precision import Gemm
from snip_megatron.sensitivity.table import StatisticsTable

MODEL = shlex.split(
    "--num-layers 2 --hidden-size 256 --ffn-hidden-size 256 --seq-length 128 --max-position-embeddings 128"
    " --micro-batch-size 2 --global-batch-size 4 --clip-grad 0"
)
AT = 3  # the step before which options are forced
TRUTH = shlex.split(
    "--snip --snip-estimator noise --snip-formats fp4 --snip-update-interval 1000 --snip-lag 500"
    f" --snip-first-update {AT} --snip-settings probe_tokens=32 --exit-interval {AT + 1}"
)


@pytest.fixture(scope="module")
def folder(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``saved``: weights and moments after AT steps. ``run``: the truth of all options before the next one."""
    folder = tmp_path_factory.mktemp("measured")
    saving = ["--save", str(folder / "saved"), "--save-interval", str(AT), "--exit-interval", str(AT)]
    warm.succeed(1, tiny_llama_args(*MODEL, *saving, iters=9), tmp=folder / "to-saved")
    args = ["--load", str(folder / "saved"), "--snip-dir", str(folder / "run"), *TRUTH]
    args += ["--snip-probe-microbatches", "2"]
    warm.succeed(1, tiny_llama_args(*MODEL, *args, iters=9), module=MEASURED, tmp=folder)
    return folder


@pytest.mark.parametrize(("again", "microbatches"), [(False, [0, 1]), (True, [2, 3])])
def test_the_truth_is_what_a_run_under_that_option_alone_shows(
    warm: WarmRanks, folder: Path, again: bool, microbatches: list[int]
) -> None:
    """A one-option map, the code that trains, torch's AdamW in float64.

    Microbatches beyond the step's keep their numbers, so stochastic rounding draws other bits in a run that counts from
    0: there only what does not depend on them is compared.
    """
    file = folder / "run" / "stats" / f"step_{AT}.npz"
    truth, names = load_truth(file)[again], [row.name for row in StatisticsTable.load(file).linears]
    of_gemms = {Gemm.FPROP: [0, 7]} if again else {Gemm.FPROP: [0, 5], Gemm.DGRAD: [2, 7], Gemm.WGRAD: [1]}
    chosen = [(names[row], gemm) for gemm, rows in of_gemms.items() for row in rows]
    env = {
        "BRUTE": str(folder / f"brute-{again}.json"),
        "BRUTE_STEP": str(AT),
        "BRUTE_MICROBATCHES": json.dumps(microbatches),
        "BRUTE_OPTIONS": json.dumps([(linear, gemm.value, "fp4") for linear, gemm in chosen]),
    }
    args = ["--load", str(folder / "saved"), "--snip", "--snip-policy", "bf16", "--exit-interval", str(AT + 1)]
    warm.succeed(1, tiny_llama_args(*MODEL, *args, iters=9), module="forced_pretrain", env=env, tmp=folder / f"{again}")
    brute = json.loads((folder / f"brute-{again}.json").read_text())
    for (linear, gemm), expected in zip(chosen, brute, strict=True):
        at = (names.index(linear), list(Gemm).index(gemm), 0)
        assert truth["raw_drift"][at] == pytest.approx(expected["drift"], rel=2e-6), (linear, gemm)
        if gemm is Gemm.FPROP:
            assert abs(expected["loss"]) > 1e-6
            expected["loss"] -= expected["first_order"]
        assert truth["loss"][at] == pytest.approx(expected["loss"], rel=1e-6, abs=2e-9)

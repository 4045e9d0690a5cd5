"""Update errors of an optimizer whose state is on the host, in a real run."""

import shlex
from pathlib import Path

import numpy as np
from launch import tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.sensitivity.table import StatisticsTable

AT = 2
PROBE = shlex.split(
    f"--snip --snip-estimator noise --snip-first-update {AT} --snip-update-interval 1000 --snip-lag 6"
    f" --snip-settings probe_tokens=48 --snip-probe-microbatches 1 --exit-interval {AT + 1}"
    " --bf16 --use-distributed-optimizer"
)
MODEL = shlex.split(
    "--num-layers 2 --hidden-size 256 --ffn-hidden-size 256 --seq-length 128 --max-position-embeddings 128"
    " --micro-batch-size 2 --global-batch-size 4"
)
ON_THE_HOST = "--use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 1.0"


def table_of(warm: WarmRanks, tmp: Path, *arguments: str, alter: str = "") -> StatisticsTable:
    run = tiny_llama_args(*MODEL, *PROBE, "--snip-dir", str(tmp / "run"), *arguments, iters=9)
    warm.succeed(2, run, module="altered_pretrain", env={"ALTER": alter}, tmp=tmp)
    return StatisticsTable.load(tmp / "run" / "stats" / f"step_{AT}.npz")


def test_an_optimizer_on_the_host_has_the_update_errors_of_one_on_the_device(warm: WarmRanks, tmp_path: Path) -> None:
    device = table_of(warm, tmp_path / "device")
    offloaded = table_of(warm, tmp_path / "host", *ON_THE_HOST.split(), alter="offload")
    assert (device.arrays["drift2"] > 0).all()
    for name in ("drift2", "by_format.wdrift2"):
        np.testing.assert_allclose(offloaded.arrays[name], device.arrays[name], rtol=1e-3, err_msg=name)

"""A training on this card times its own GEMMs before its first update, and a resume has the same times."""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from snip_megatron.numerics.products.selection import native_backend
from snip_megatron.runtime.config import FASTEST
from snip_megatron.runtime.run_data import TIMINGS, read_config, read_events, read_maps
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.timing.table import TimingTable

REPOSITORY = Path(__file__).resolve().parents[2]
TRAINING = shlex.split("""
--num-layers 2 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 32 --group-query-attention
--num-query-groups 4 --seq-length 2048 --max-position-embeddings 2048 --position-embedding-type rope
--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0
--hidden-dropout 0 --micro-batch-size 4 --global-batch-size 4 --bf16 --use-distributed-optimizer
--transformer-impl local --lr 1e-4 --lr-decay-iters 14 --seed 1234 --log-interval 1 --num-workers 0 --mock-data
--tokenizer-type NullTokenizer --vocab-size 1023 --ckpt-format torch_dist
--train-iters 14 --eval-interval 100 --eval-iters 1 --save-interval 100
--disable-jit-fuser --snip --snip-first-update 2 --snip-update-interval 6 --snip-lag 4 --snip-wait 120
""")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or native_backend("auto") != "hopper", reason="needs a card that multiplies FP8"
)


def train(folder: Path, *extra: str) -> str:
    """Run the entry with ``--snip`` alone as to budget and formats; return what it prints."""
    saved = ("--save", str(folder / "saved"), "--snip-dir", str(folder / "run"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m",
               "snip_megatron.pretrain_gpt", *TRAINING, *saved, *extra]  # fmt: skip
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    return process.stdout


def test_a_training_times_its_gemms_and_a_resume_has_the_same(tmp_path: Path) -> None:
    run = tmp_path / "run"
    started = time.monotonic()
    said = train(tmp_path, "--exit-interval", "8")
    print(f"first start: {time.monotonic() - started:.0f} s")
    (line,) = [line for line in said.splitlines() if line.startswith("snip: timed the GEMMs of this model (4 shapes")]
    print(line)
    table = TimingTable.load(run / TIMINGS)
    assert table.device == torch.cuda.get_device_name()
    request = SolveRequest.from_dict(read_config(run)["facts"]["request"], "config.json")
    assert request.budget == FASTEST  # the data are --mock-data
    assert request.times is not None
    assert [event["event"] for event in read_events(run)].count("times") == 1
    said = train(tmp_path, "--load", str(tmp_path / "saved"))
    assert f"snip: times of this model's GEMMs: {run / TIMINGS}" in said
    assert SolveRequest.from_dict(read_config(run)["facts"]["request"], "config.json").times == request.times
    assert read_maps(run)

"""Starts real ranks the way a user does: torchrun, gloo on the CPU, a Llama small enough to train in seconds."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

_LLAMA = shlex.split("""
--num-layers 4 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4
--group-query-attention --num-query-groups 2 --seq-length 64 --max-position-embeddings 64
--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
--micro-batch-size 2 --global-batch-size 4 --eval-iters 0 --eval-interval 1000
--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 --clip-grad 1.0
--log-interval 1 --num-workers 0
""")
_MOCK_DATA = shlex.split("--mock-data --tokenizer-type NullTokenizer --vocab-size 255")


def tiny_llama_args(*extra: str, iters: int = 10, mock_data: bool = True) -> list[str]:
    """Megatron's arguments of a 4-layer Llama (hidden 64, 64 tokens) for ``iters`` steps; a later ``extra`` wins.

    ``SNIP_TEST_SEED`` is added to the seed of weights and data: a test must not depend on its draws.
    """
    llama = [word for word in _LLAMA if word != "--group-query-attention" or "--multi-latent-attention" not in extra]
    data = _MOCK_DATA if mock_data else []
    seed = str(1234 + int(os.environ.get("SNIP_TEST_SEED", "0")))
    return [*llama, *data, "--seed", seed, "--train-iters", str(iters), *extra]


def run_ranks(
    ranks: int,
    args: Sequence[str],
    *,
    module: str,
    env: Mapping[str, str],
    tmp: Path,
    restarts: int = 0,
    timeout: float = 400.0,
) -> subprocess.CompletedProcess[str]:
    """``-m module args`` on ranks that torchrun starts in the folder ``tmp``, and restarts up to ``restarts`` times.

    Output goes to files and not to pipes, which Megatron's server of checkpoint queues would hold open.
    """
    tmp.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--max-restarts={restarts}"]
    command += ["--monitor-interval=0.2", f"--nproc-per-node={ranks}", "-m", module, *args]
    # Ranks that are restarted must not find the addresses of dead ones.
    environment = os.environ | cpu_environment() | env | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (tmp / "out").open("w") as out, (tmp / "err").open("w") as err:
        code = subprocess.call(command, stdout=out, stderr=err, cwd=tmp, env=environment, timeout=timeout)
    return subprocess.CompletedProcess(args, code, (tmp / "out").read_text(), (tmp / "err").read_text())


def run_alone(args: Sequence[str], *, env: Mapping[str, str], tmp: Path) -> subprocess.CompletedProcess[str]:
    """The entry in one process without a launcher."""
    outer = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = {**outer, **cpu_environment(), **env}
    command = [sys.executable, "-m", "snip_megatron.pretrain_gpt", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=tmp, env=environment)


def cpu_environment() -> dict[str, str]:
    """Variables for a quiet run on the CPU, with the repository and these helpers importable."""
    folders = (str(REPOSITORY), str(Path(__file__).parent), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH"))
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "GLOO_SOCKET_IFNAME": "lo",
        "WANDB_MODE": "offline",
    }


def succeeded(process: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert process.returncode == 0, process.stderr[-6000:]
    return process


def losses(process: subprocess.CompletedProcess[str]) -> dict[int, float]:
    """Step (from 1) -> printed training loss. The second one after a start is the mean of two (Megatron's log)."""
    result = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+)", process.stdout)
    return {int(step): float(loss) for step, loss in result}


def error_lines(process: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines that our commands print for a SnipError."""
    return [line for line in process.stderr.splitlines() if line.startswith(("pretrain_gpt:", "snip "))]

"""The training entry with every rank as a separate host with one GPU: more ranks than GPUs on one machine.

    torchrun --nproc-per-node 4 -m benchmarks.jobs.one_gpu_hosts 0,1 --tensor-model-parallel-size 2 ...

NCCL refuses two ranks of one host on the same GPU. With a separate host name for each rank, the ranks communicate over
sockets, as hosts without a faster network do. They compute what four GPUs would, but not as fast.
"""

from __future__ import annotations

import os
import runpy
import sys


def as_host(local_rank: int, gpus: str) -> dict[str, str]:
    """Return the environment of rank ``local_rank`` as the only rank of a host with one of ``gpus``."""
    names = gpus.split(",")
    return {
        "CUDA_VISIBLE_DEVICES": names[local_rank % len(names)],
        "NCCL_HOSTID": f"host-{local_rank}",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }


if __name__ == "__main__":
    os.environ.update(as_host(int(os.environ["LOCAL_RANK"]), sys.argv.pop(1)))  # before torch sees the GPUs
    runpy.run_module("snip_megatron.pretrain_gpt", run_name="__main__", alter_sys=True)

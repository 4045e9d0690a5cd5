"""Ranks that fail twice under torchrun's ``--max-restarts``, and what each attempt finds in the store."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from snip_megatron.megatron.compat import restart_store


def main() -> None:
    needed = restart_store.is_needed()
    if needed:
        print(restart_store.install(), restart_store.install(), flush=True)
    dist.init_process_group("gloo")
    store, attempt = _get_default_store(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    print(f"attempt {attempt} needed {needed} old {store.check(['mark'])} of {dist.get_world_size()}", flush=True)
    dist.barrier()
    store.set("mark", "")
    dist.barrier()
    if attempt != "2":
        os._exit(3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

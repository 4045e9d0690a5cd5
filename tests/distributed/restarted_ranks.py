"""Ranks that fail twice under torchrun's ``--max-restarts``, and what each attempt finds in the store."""

import importlib.util
import os

import torch.distributed as dist
from launch import REPOSITORY
from torch.distributed.distributed_c10d import _get_default_store

# The module alone: its package would import Megatron, in every rank of every attempt.
specification = importlib.util.spec_from_file_location(
    "restart_store", REPOSITORY / "snip_megatron" / "megatron" / "compat" / "restart_store.py"
)
assert specification is not None
assert specification.loader is not None
restart_store = importlib.util.module_from_spec(specification)
specification.loader.exec_module(restart_store)


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

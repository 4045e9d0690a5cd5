"""``restart-store``: gives ranks that torchrun restarts a key prefix of their own in torchrun's store.

torchrun of torch 2.11 keeps one store for all restarts, unless ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``, and torch does
not put the attempt into its keys. Restarted ranks may therefore read the addresses of ranks that have died, and fail or
wait until they time out.
"""

import functools
import os
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore


def is_needed() -> bool:
    """Whether these ranks were restarted by a torchrun that shares its store between restarts."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    own = os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") == "1"
    return shared and not own and _attempt() > 0


def install() -> str:
    """Make ``init_process_group`` use a store with this attempt's prefix unless the caller passes a store.

    A second call in the same process does nothing. Returns a description for the list printed at start.
    """
    initialise = dist.init_process_group
    if not hasattr(initialise, "snip_attempt"):

        @functools.wraps(initialise)
        def with_own_keys(*args: Any, **kwargs: Any) -> Any:
            if len(args) < 2 and kwargs.get("store") is None and kwargs.get("init_method") is None:
                timeout = {"timeout": kwargs["timeout"]} if kwargs.get("timeout") is not None else {}
                host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                store = TCPStore(host, port, is_master=False, **timeout)
                kwargs["store"] = PrefixStore(f"snip_attempt_{_attempt()}", store)
                # If a store is given, torch does not read these from the environment.
                kwargs.setdefault("rank", int(os.environ["RANK"]))
                kwargs.setdefault("world_size", int(os.environ["WORLD_SIZE"]))
            return initialise(*args, **kwargs)

        with_own_keys.snip_attempt = True  # type: ignore[attr-defined]
        dist.init_process_group = with_own_keys
    return f"restart {_attempt()} by torchrun, ranks meet under keys of their own in its store"


def _attempt() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

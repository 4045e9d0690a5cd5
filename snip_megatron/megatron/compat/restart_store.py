"""Ranks that torchrun starts again meet under keys of their own.

torchrun of torch 2.11 keeps one store for all its rounds, unless ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``, and torch
puts no prefix of the attempt before its keys: ranks started again may read the addresses of those that have died, and
then fail or wait until they time out.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore


def is_needed() -> bool:
    """Whether these ranks were started again by a torchrun that shares its store between rounds."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    own = os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") == "1"
    return shared and not own and _attempt() > 0


def install() -> str:
    """Give ``init_process_group`` a store under this attempt's prefix where the caller gives none. Once a process."""
    initialise = dist.init_process_group
    if not hasattr(initialise, "snip_attempt"):

        @functools.wraps(initialise)
        def with_own_keys(*args: Any, **kwargs: Any) -> Any:
            if len(args) < 2 and kwargs.get("store") is None and kwargs.get("init_method") is None:
                timeout = {"timeout": kwargs["timeout"]} if kwargs.get("timeout") is not None else {}
                host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                store = TCPStore(host, port, is_master=False, **timeout)
                kwargs["store"] = PrefixStore(f"snip_attempt_{_attempt()}", store)
                # With a store, torch does not look into the environment for these.
                kwargs.setdefault("rank", int(os.environ["RANK"]))
                kwargs.setdefault("world_size", int(os.environ["WORLD_SIZE"]))
            return initialise(*args, **kwargs)

        with_own_keys.snip_attempt = True  # type: ignore[attr-defined]
        dist.init_process_group = with_own_keys
    return f"restart {_attempt()} by torchrun, ranks meet under keys of their own in its store"


def _attempt() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

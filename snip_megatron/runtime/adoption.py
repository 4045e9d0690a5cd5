"""Distribution of a map to all ranks: a broadcast from rank 0, and a comparison of hashes before adoption."""

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.errors import SnipError
from snip_megatron.precision.phases import PrecisionPlan

EXIT_MAP_MISMATCH = 18
"""Exit code if ranks received different maps (Megatron's rerun state machine uses 16 and 17)."""

_ATTEMPTS = 3


@dataclass(frozen=True)
class Decision:
    """Rank 0's decision at the step at which an update is due: the map to adopt (None for none), in a run with phases
    the ``plan`` of all remaining ones. If the outcome is not known it is not ``ready``, and the decision is postponed.
    """

    precision_map: PrecisionMap | None = None
    plan: PrecisionPlan | None = None
    ready: bool = True


class MapMismatchError(SnipError):
    """Ranks received different maps in every attempt, so that training must end."""

    exit_code = EXIT_MAP_MISMATCH


class MapChannel:
    """Broadcasts decisions of rank 0. Its methods are collectives, which all ranks must call at the same step. The
    global ``names`` of all linears, in order, are a part of the hash.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._names = list(names)
        self._device = device

    def agree[T](self, own: T | None) -> T:
        """Broadcast what rank 0 has, such as a decision (``own``, None on other ranks), and compare the hashes of what
        arrived.

        Figures and plans go with a map, because all ranks keep them for the checkpoint. Raises MapMismatchError if the
        hashes differed in each of three attempts.
        """
        if not dist.is_initialized():  # a process of its own
            assert own is not None
            return own
        for _ in range(_ATTEMPTS):
            arrived = self._broadcast(pickle.dumps(own))
            if self._same_everywhere(arrived):
                found: T = pickle.loads(arrived)
                return found
        raise MapMismatchError(f"ranks disagree about the precision map after {_ATTEMPTS} broadcasts")

    def everywhere(self, own: bool) -> bool:
        """Return whether ``own`` is true on all ranks."""
        if not dist.is_initialized():
            return own
        flag = torch.tensor([int(own)], dtype=torch.int32, device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag.item())

    def _broadcast(self, message: bytes) -> bytes:
        size = torch.tensor([len(message)], dtype=torch.int64, device=self._device)
        dist.broadcast(size, src=0)
        own = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        buffer = (own if dist.get_rank() == 0 else torch.zeros(int(size), dtype=torch.uint8)).to(self._device)
        dist.broadcast(buffer, src=0)
        return buffer.cpu().numpy().tobytes()

    def _same_everywhere(self, message: bytes) -> bool:
        digest = hashlib.sha256(message + "\0".join(self._names).encode()).digest()
        value = int.from_bytes(digest[:8], "little") >> 2  # its negative must fit into int64 as well
        bounds = torch.tensor([value, -value], dtype=torch.int64, device=self._device)
        dist.all_reduce(bounds, op=dist.ReduceOp.MIN)
        low, high = (int(bound) for bound in bounds.cpu())
        return low == -high

"""Distribution of a map to all ranks: a broadcast from rank 0, and a comparison of hashes before adoption."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist

from snip_megatron.errors import SnipError
from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.phases import PrecisionPlan

EXIT_MAP_MISMATCH = 18
"""Exit code if ranks received different maps (Megatron's rerun state machine uses 16 and 17)."""

_ATTEMPTS = 3


class Verdict(IntEnum):
    """Rank 0's verdict at the step at which a decision is due: no result yet, a map, or an update without a map."""

    NOT_READY = 0
    MAP = 1
    DROPPED = 2


@dataclass(frozen=True)
class Decision:
    """Rank 0's decision. ``precision_map`` is set if the verdict is :attr:`Verdict.MAP`.

    ``plan`` holds the maps of all remaining phases in a run with phases.
    """

    verdict: Verdict
    precision_map: PrecisionMap | None = None
    plan: PrecisionPlan | None = None

    def to_bytes(self) -> bytes:
        """Return the decision as JSON."""
        parts = {"map": self.precision_map, "plan": self.plan}
        body = {name: None if part is None else part.as_dict() for name, part in parts.items()}
        return json.dumps({"verdict": self.verdict, **body}).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Decision:
        """Return the decision of :meth:`to_bytes`."""
        body = json.loads(content)
        found = None if body["map"] is None else PrecisionMap.from_dict(body["map"])
        plan = None if body["plan"] is None else PrecisionPlan.from_dict(body["plan"])
        return cls(Verdict(body["verdict"]), found, plan)


class MapMismatchError(SnipError):
    """Ranks received different maps in every attempt, so that training must end."""

    exit_code = EXIT_MAP_MISMATCH


class MapChannel:
    """Broadcasts decisions of rank 0. Its methods are collectives, which all ranks must call at the same step.

    Args:
        names: global names of all linears, in order. They are a part of the hash.
        device: the device of tensors in collectives.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._names = list(names)
        self._device = device

    def agree(self, decision: Decision | None) -> Decision:
        """Broadcast a decision, and compare the hashes of what arrived.

        Args:
            decision: the decision on rank 0; None on other ranks.

        Raises:
            MapMismatchError: the hashes differed in each of three attempts.
        """
        return Decision.from_bytes(self._agreed(None if decision is None else decision.to_bytes()))

    def agree_steps(self, steps: Sequence[int] | None) -> list[int]:
        """Broadcast the steps of a recorded schedule from rank 0. ``steps`` is None on other ranks."""
        found: list[int] = json.loads(self._agreed(None if steps is None else json.dumps(list(steps)).encode()))
        return found

    def everywhere(self, own: bool) -> bool:
        """Return whether ``own`` is true on all ranks."""
        if not dist.is_initialized():
            return own
        flag = torch.tensor([int(own)], dtype=torch.int32, device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag.item())

    def _agreed(self, message: bytes | None) -> bytes:
        if not dist.is_initialized():  # a process of its own
            assert message is not None
            return message
        for _ in range(_ATTEMPTS):
            arrived = self._broadcast(message)
            if self._same_everywhere(arrived):
                return arrived
        raise MapMismatchError(f"ranks disagree about the precision map after {_ATTEMPTS} broadcasts")

    def _broadcast(self, message: bytes | None) -> bytes:
        size = torch.tensor([len(message or b"")], dtype=torch.int64, device=self._device)
        dist.broadcast(size, src=0)
        buffer = torch.zeros(int(size), dtype=torch.uint8)
        if message:
            buffer.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        buffer = buffer.to(self._device)
        dist.broadcast(buffer, src=0)
        return buffer.cpu().numpy().tobytes()

    def _same_everywhere(self, message: bytes) -> bool:
        digest = hashlib.sha256(message + "\0".join(self._names).encode()).digest()
        value = int.from_bytes(digest[:8], "little") >> 2  # its negative must fit into int64 as well
        bounds = torch.tensor([value, -value], dtype=torch.int64, device=self._device)
        dist.all_reduce(bounds, op=dist.ReduceOp.MIN)
        low, high = (int(bound) for bound in bounds.cpu())
        return low == -high

"""Distribution of a map to all ranks: an int8 broadcast from rank 0, and a comparison of hashes before adoption."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
import torch.distributed as dist

from snip_megatron.errors import SnipError
from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.phases import PrecisionPlan

EXIT_MAP_MISMATCH = 18
"""Exit code if ranks received different maps (Megatron's rerun state machine uses 16 and 17)."""

_ATTEMPTS = 3
_META_BYTES = 4096
_META_FIELDS = (
    "version", "status", "objective", "bound", "target", "achieved", "achieved_per_stage", "solve_seconds", "budget",
    "loss", "speedup", "fp4_share", "step_speedup",
)  # fmt: skip


class Verdict(IntEnum):
    """Rank 0's verdict at the step at which a decision is due: no result yet, a map, or an update without a map."""

    NOT_READY = 0
    MAP = 1
    DROPPED = 2


@dataclass(frozen=True)
class Decision:
    """Rank 0's decision. ``precision_map`` is set if the verdict is :attr:`Verdict.MAP`.

    ``plan`` holds the maps of all remaining phases in a run with phases. :meth:`MapChannel.agree` does not broadcast
    it.
    """

    verdict: Verdict
    precision_map: PrecisionMap | None = None
    plan: PrecisionPlan | None = None


class MapMismatchError(SnipError):
    """Ranks received different maps in every attempt, so that training must end."""

    exit_code = EXIT_MAP_MISMATCH


class MapChannel:
    """Broadcasts decisions of rank 0. Its methods are collectives, which all ranks must call at the same step.

    Args:
        names: global names of all linears, in the order of the codes.
        device: the device of tensors in collectives of the group.
        group: all training ranks; None for the default group. Its rank 0 decides.
    """

    def __init__(self, names: Sequence[str], device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._names = list(names)
        self._device = device
        self._group = group

    def agree(self, decision: Decision | None) -> Decision:
        """Broadcast a decision, and compare the hashes of what arrived.

        Args:
            decision: the decision on rank 0; None on other ranks.

        Raises:
            MapMismatchError: the hashes differed in each of three attempts.
        """
        if not dist.is_initialized():  # a process of its own
            assert decision is not None
            return decision
        for _ in range(_ATTEMPTS):
            message = self._broadcast(decision)
            if self._same_everywhere(message):
                return self._decode(message, decision)
        raise MapMismatchError(f"ranks disagree about the precision map after {_ATTEMPTS} broadcasts")

    def agree_plan(self, plan: PrecisionPlan | None) -> PrecisionPlan:
        """Broadcast a plan from rank 0, and compare the hashes of what arrived. ``plan`` is None on other ranks.

        Raises:
            MapMismatchError: the hashes differed in each of three attempts.
        """
        text = None if plan is None else plan.to_json().encode()
        for _ in range(_ATTEMPTS):
            message = self._broadcast_text(text)
            if self._same_everywhere(message):
                return plan if plan is not None else PrecisionPlan.from_json(message, where="the plan of rank 0")
        raise MapMismatchError(f"ranks disagree about the plan of precision maps after {_ATTEMPTS} broadcasts")

    def agree_steps(self, steps: Sequence[int] | None) -> list[int]:
        """Broadcast the steps of a replay's schedule from rank 0. ``steps`` is None on other ranks."""
        count = torch.tensor([len(steps or ())], dtype=torch.int64, device=self._device)
        dist.broadcast(count, src=self._source, group=self._group)
        values = torch.zeros(int(count), dtype=torch.int64, device=self._device)
        if steps:
            values.copy_(torch.tensor(list(steps), dtype=torch.int64))
        dist.broadcast(values, src=self._source, group=self._group)
        return [int(value) for value in values.cpu()]

    def _broadcast_text(self, text: bytes | None) -> bytes:
        (size,) = self.agree_steps(None if text is None else [len(text)])
        buffer = torch.zeros(size, dtype=torch.uint8)
        if text is not None:
            buffer.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        buffer = buffer.to(self._device)
        dist.broadcast(buffer, src=self._source, group=self._group)
        return buffer.cpu().numpy().tobytes()

    @property
    def _source(self) -> int:
        return 0 if self._group is None else dist.get_global_rank(self._group, 0)

    def _broadcast(self, decision: Decision | None) -> bytes:
        buffer = torch.zeros(1 + 3 * len(self._names) + _META_BYTES, dtype=torch.int8)
        if decision is not None:
            buffer.copy_(torch.from_numpy(np.frombuffer(self._encode(decision), dtype=np.int8).copy()))
        buffer = buffer.to(self._device)
        dist.broadcast(buffer, src=self._source, group=self._group)
        return buffer.cpu().numpy().tobytes()

    def _encode(self, decision: Decision) -> bytes:
        """Encode verdict, int8 codes, and the map's figures as JSON padded with zeros. All ranks know the size."""
        precision_map = decision.precision_map or PrecisionMap(choices={})
        fields = {name: getattr(precision_map, name) for name in _META_FIELDS}
        fields["achieved_per_stage"] = dict(precision_map.achieved_per_stage)
        meta = json.dumps(fields).encode()
        if len(meta) > _META_BYTES:
            meta = json.dumps(fields | {"achieved_per_stage": {}}).encode()
        codes = precision_map.to_codes(self._names).tobytes()
        return bytes([decision.verdict]) + codes + meta.ljust(_META_BYTES, b"\0")

    def _decode(self, message: bytes, decision: Decision | None) -> Decision:
        if decision is not None:
            return decision
        verdict = Verdict(message[0])
        if verdict is not Verdict.MAP:
            return Decision(verdict)
        codes = np.frombuffer(message[1:-_META_BYTES], dtype=np.int8).reshape(-1, 3)
        meta = json.loads(message[-_META_BYTES:].rstrip(b"\0"))
        return Decision(verdict, PrecisionMap.from_codes(self._names, codes, **meta))

    def _same_everywhere(self, message: bytes) -> bool:
        digest = hashlib.sha256(message + "\0".join(self._names).encode()).digest()
        value = int.from_bytes(digest[:8], "little") >> 2  # its negative must fit into int64 as well
        bounds = torch.tensor([value, -value], dtype=torch.int64, device=self._device)
        dist.all_reduce(bounds, op=dist.ReduceOp.MIN, group=self._group)
        low, high = (int(bound) for bound in bounds.cpu())
        return low == -high

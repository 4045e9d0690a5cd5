"""What ranks exchange: flags and objects, values of rank 0, the figures of a step, votes on the parts of an update.

The step report is needed because under pipeline parallelism only the last stage has the loss, while rank 0 writes the
metrics (docs/how-it-works.md, rules of a run: 6).
"""

import hashlib
import math
import pickle
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from snip_megatron.precision.errors import SnipError
from snip_megatron.precision.strict_json import JsonFields

EXIT_MAP_MISMATCH = 18
"""Exit code if ranks received different maps (Megatron's rerun state machine uses 16 and 17)."""

EXIT_UPDATE_BROKEN = 20
"""Exit code if an update failed on one rank where other ranks wait for it."""

_ATTEMPTS = 3
_MESSAGE = 500  # characters of an exception's message


# -- collectives, which a process alone does without ---------------------------------------------------------------
def rank() -> int:
    """Return this process's rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def all_reduced(
    x: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Reduce a tensor over the ranks of a group, by default all, in place, and return it. Collective."""
    if dist.is_initialized():
        dist.all_reduce(x, op, group)
    return x


def is_true_on_any(flag: bool, device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether ``flag`` is true on a rank of a group, by default on one of all. Collective."""
    return bool(all_reduced(torch.tensor(int(flag), dtype=torch.int32, device=device), dist.ReduceOp.MAX, group).item())


def objects_of_ranks[T](local: T) -> list[T]:
    """Return a picklable object of every rank. Collective."""
    objects = [local]
    if dist.is_initialized():
        objects *= dist.get_world_size()
        dist.all_gather_object(objects, local)
    return objects


# -- values of rank 0 ----------------------------------------------------------------------------------------------
class MapMismatchError(SnipError):
    """Ranks received different maps in every attempt, so that training must end."""

    exit_code = EXIT_MAP_MISMATCH


@dataclass(eq=False)
class MapChannel:
    """Broadcasts values of rank 0. Its methods are collectives, which all ranks must call at the same step."""

    names: Sequence[str]  # global names of all linears, in order, which are a part of the hash that ranks compare
    device: torch.device

    def agree[T](self, value: T) -> T:
        """Return rank 0's ``value``, after ranks have compared hashes of what they received.

        Raises MapMismatchError if the hashes differed in each of three attempts.
        """
        if not dist.is_initialized():  # a single process
            return value
        for _ in range(_ATTEMPTS):
            message = self._broadcast(pickle.dumps(value))
            if self._is_equal_on_all_ranks(message):
                received: T = pickle.loads(message)
                return received
        raise MapMismatchError(f"ranks disagree about the precision map after {_ATTEMPTS} broadcasts")

    def _broadcast(self, message: bytes) -> bytes:
        size = torch.tensor([len(message)], dtype=torch.int64, device=self.device)
        dist.broadcast(size, src=0)
        sent = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        buffer = (sent if dist.get_rank() == 0 else torch.zeros(int(size), dtype=torch.uint8)).to(self.device)
        dist.broadcast(buffer, src=0)
        return buffer.cpu().numpy().tobytes()

    def _is_equal_on_all_ranks(self, message: bytes) -> bool:
        digest = hashlib.sha256(message + "\0".join(self.names).encode()).digest()
        value = int.from_bytes(digest[:8], "little") >> 2  # its negative must fit into int64 as well
        bounds = torch.tensor([value, -value], dtype=torch.int64, device=self.device)
        low, high = all_reduced(bounds, dist.ReduceOp.MIN).tolist()
        return bool(low == -high)


# -- figures of a step ---------------------------------------------------------------------------------------------
_ACCOUNT = ("step_s", "speedup", "saved_h")
_LOSS, _RANKS, _BROKEN, _STEP_S = range(4)  # places in the summed tensor. The last one begins :data:`_ACCOUNT`

News = Callable[[], Mapping[str, float] | None]
"""Returns rank 0's figures about the speed of the run, or None if there are no new ones."""


@dataclass(frozen=True)
class StepFigures(JsonFields):
    """The figures of one training step, equal on all ranks."""

    step: int
    loss: float | None  # mean loss over the ranks that have it. None if no rank has it or it is not finite
    grad_norm: float | None  # gradient norm before clipping. None if it is unknown or not finite
    broken: bool = False  # whether the loss or the gradient norm was NaN or Inf on any rank
    # rank 0's figures about the speed of the run, at the steps that have new ones: ``step_s``, and if they are known
    # ``speedup`` over bf16 and ``saved_h``, the hours saved so far
    account: Mapping[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class StepReport:
    """Sums the figures of a step over all ranks while the next step runs.

    On a GPU, a separate stream copies the sum to the host. Reading it one step later does not wait for the training
    stream, so that the launching thread stays ahead of the GPU.
    """

    device: torch.device  # of the summed tensor
    arrived: StepFigures | None = None  # figures from a checkpoint, which the first :meth:`exchange` returns
    news: News | None = None  # called at every step on rank 0 for the figures of :attr:`StepFigures.account`

    def __post_init__(self) -> None:
        # Step, gradient norm, sums (kept alive until they are copied), their copy on the host, what waits for it.
        self._flight: tuple[int, float | None, torch.Tensor, torch.Tensor, Callable[[], object]] | None = None
        on_gpu = self.device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(self.device) if on_gpu else None  # type: ignore[no-untyped-call]

    def exchange(self, step: int, loss: torch.Tensor | None, grad_norm: float | None) -> StepFigures | None:
        """Start the collective of this step, and return the figures of the previous step. All ranks must call it.

        ``loss`` is a scalar, None on ranks that have none. ``grad_norm`` is equal on all ranks.
        """
        arrived = self.drain()
        values = torch.zeros(_STEP_S + len(_ACCOUNT), dtype=torch.float64, device=self.device)
        if grad_norm is not None and not math.isfinite(grad_norm):
            values[_BROKEN] = 1.0
        if loss is not None:
            scalar = loss.detach().double().reshape(())
            values[_LOSS], values[_RANKS] = scalar, 1.0
            values[_BROKEN] += ~scalar.isfinite()
        news = None if self.news is None else self.news()
        if news is not None:
            figures = [news.get(name, math.nan) for name in _ACCOUNT]
            values[_STEP_S:] = torch.tensor(figures, dtype=torch.float64)
        work = dist.all_reduce(values, async_op=True) if dist.is_initialized() else None
        self._flight = (step, grad_norm, values, *self._landing(values, work))
        return arrived

    def _landing(self, values: torch.Tensor, work: Any) -> tuple[torch.Tensor, Callable[[], object]]:
        """Return the tensor on the host in which the sums arrive, and the function that waits for them."""
        if self._stream is None:
            return values, (lambda: None) if work is None else work.wait
        host = torch.empty(values.numel(), dtype=torch.float64, pin_memory=True)
        landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        if work is None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            if work is not None:
                work.wait()
            host.copy_(values, non_blocking=True)
            landed.record()
        return host, landed.synchronize

    def in_flight(self) -> StepFigures | None:
        """Wait for the outstanding figures and return them for a checkpoint. The next exchange returns them again."""
        self.arrived = self.drain()
        return self.arrived

    def drain(self) -> StepFigures | None:
        """Wait for the outstanding figures and return them. None if there are none."""
        if self._flight is None:
            arrived, self.arrived = self.arrived, None
            return arrived
        (step, norm, _, host, wait), self._flight = self._flight, None
        wait()
        sums = host.tolist()
        account = zip(_ACCOUNT, sums[_STEP_S:], strict=True) if sums[_STEP_S] > 0 else ()  # a step takes some time
        loss = sums[_LOSS] / sums[_RANKS] if sums[_RANKS] > 0 and math.isfinite(sums[_LOSS]) else None
        return StepFigures(
            step,
            loss,
            norm if norm is not None and math.isfinite(norm) else None,
            broken=sums[_BROKEN] > 0,
            account={name: value for name, value in account if math.isfinite(value)},
        )


# -- updates as transactions ---------------------------------------------------------------------------------------
class Failure(NamedTuple):
    """The exception that ended an update on one rank, in a part of :class:`Transaction`."""

    part: str
    error: str
    message: str
    rank: int
    host: str
    out_of_memory: bool
    unsupported: bool  # a SnipError: the model or the loop is not one that SNIP measures

    @classmethod
    def of(cls, part: str, error: BaseException) -> "Failure":
        """Describe an exception of this rank."""
        memory, unsupported = isinstance(error, torch.OutOfMemoryError | MemoryError), isinstance(error, SnipError)
        message, host = " ".join(str(error).split())[:_MESSAGE], socket.gethostname()
        return cls(part, type(error).__name__, message, rank(), host, memory, unsupported)

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the event."""
        return {"part": self.part, "rank": self.rank, "host": self.host, "error": self.error}

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}, {self.part}: {self.error}: {self.message}"


@dataclass(eq=False)
class UpdateDroppedError(Exception):
    """All ranks drop an update. Equal on all ranks."""

    reason: str  # the reason in one line
    fields: Mapping[str, Any] = field(default_factory=dict)  # fields of the event
    # sequences of a microbatch that the next update takes at most. None if as many as this one
    sequences: int | None = None


class UnsupportedError(SnipError):
    """Each rank has raised a SnipError in an update: the model or the loop is not one that SNIP measures."""


class UpdateBrokenError(SnipError):
    """``work``, by default an update, failed on this rank where others wait for it, so that training must end.

    ``is_cause`` says whether the exception is this rank's. Otherwise it has lost the connection to another one.
    """

    exit_code = EXIT_UPDATE_BROKEN

    def __init__(self, step: int, failure: Failure, error: BaseException, work: str = "the update") -> None:
        advice = "; lower --micro-batch-size" if failure.out_of_memory else ""
        super().__init__(
            f"{failure}; {work} of step {step} failed where other ranks wait for this one, so the job ends: restart"
            f" it from its checkpoint{advice}"
        )
        self.is_cause = not (isinstance(error, dist.DistError) or "gloo" in str(error))


class Transaction:
    """An update, which all ranks finish or all drop.

    A rank does the work of a part (:mod:`snip_megatron.runtime.probe` lists them) inside :meth:`attempt` or
    :meth:`together`, which catch its exceptions. Collectives stand between them, and are entered only after a vote.
    """

    def __init__(self, device: torch.device) -> None:
        self.part = ""  # in progress
        self.sequences = 0  # sequences of a microbatch that the passes take. 0 before it is known
        self._failure: Failure | None = None
        self._votes = torch.zeros(2, dtype=torch.int64, device=device)  # allocated before memory may be short

    def attempt[**P, T](self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return the result of ``work``. Returns None if it raises an exception, or if this rank has failed before.

        Other ranks must not wait for ``work``. The frames of an exception are released, with their tensors.
        """
        if self._failure is None:
            try:
                return work(*args, **kwargs)
            except Exception as error:
                self._failure = Failure.of(self.part, error)
        return None

    def together[**P, T](self, part: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of ``work`` if all ranks have one. Collective.

        Raises as :meth:`vote` if a rank has failed, in ``work`` or before.
        """
        self.part = part
        result = self.attempt(work, *args, **kwargs)
        self.vote()
        return result  # type: ignore[return-value]

    def vote(self) -> None:
        """Raise UpdateDroppedError on all ranks if a rank has failed, or UnsupportedError. Collective."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        failure = self._failure
        self._votes[0] = ranks if failure is None else failure.rank
        self._votes[1] = int(failure is not None and failure.unsupported)
        first, everywhere = all_reduced(self._votes, dist.ReduceOp.MIN).tolist()
        if first == ranks:
            return
        failures = [failure]
        if dist.is_initialized():
            dist.broadcast_object_list(failures, src=first, device=self._votes.device)
        assert failures[0] is not None
        if everywhere:
            raise UnsupportedError(failures[0].message)
        raise self.dropped(failures[0])

    def dropped(self, failure: Failure) -> UpdateDroppedError:
        """Return what all ranks raise for a failure on one of them. If memory was short, the next pass is smaller."""
        fewer = max(1, self.sequences // 2) if failure.out_of_memory and self.sequences else None
        return UpdateDroppedError(str(failure), failure.fields, fewer)

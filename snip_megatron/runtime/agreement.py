"""One agreed start: ranks compare their configurations and share their errors. All of them start, or none.

Each rank makes a table of its configuration, field → value. Rank 0 collects the tables and compares them with its own.
If anything differs, it prints one line, and all ranks end with the same error.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import snip_megatron
from snip_megatron.precision.errors import AgreedError, SnipError, cut, first_line, installed_version
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.options import flag

EXIT_DISAGREEMENT = 19
"""Exit code of all ranks if their configurations differ. 18 stands for different maps, 16 and 17 are Megatron's."""

Table = Mapping[str, str]
"""Field of the configuration → value, in the order in which differences are looked for."""

_LIBRARY = "GEMM library"
_FASTEST = "DeepGEMM"  # of the GEMM libraries
_PACKAGE, _CUBLASLT = "snip_megatron", "cuBLASLt"
WHERE_KNOWN = {_PACKAGE, _CUBLASLT}
"""Fields that not every rank has, and that only the ranks which have them compare. Those of the package are on the
first rank of each node. A rank without cuBLASLt has another :data:`_LIBRARY`.
"""

_LOCAL = {"enabled", "dir", "timings", "replay"}
"""Fields of SnipConfig that may differ between ranks. Only rank 0 uses these files."""
_PATIENCE = timedelta(minutes=30)  # for the slowest rank, as torch's. The launcher notices ranks that have died.
_NAMED_HOSTS = 4


@dataclass(frozen=True)
class Terms:
    """What a rank must agree about with the others."""

    table: Table  # the fields that must be equal
    # takes the ``gemm_library`` of all ranks where they have loaded different ones. None if the user has named a
    # library: then such ranks do not start
    use_library: Callable[[str], None] | None = None


# -- the table -----------------------------------------------------------------------------------------------------
def configuration_table(config: SnipConfig, backend: str, library: str, versions: Table) -> dict[str, str]:
    """Return the fields of a configuration and of this rank's machine that must be equal on all ranks.

    ``library`` multiplies for the GEMM backend named ``backend``. ``versions`` are those of further packages.
    """
    import torch

    from snip_megatron.numerics.products import cublaslt

    table: dict[str, str] = {}
    if os.environ.get("LOCAL_RANK", "0") == "0":
        table[_PACKAGE] = " ".join(filter(None, (snip_megatron.__version__, commit())))
    table |= {**versions, "torch": torch.__version__}
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        table["card"] = f"{torch.cuda.get_device_name()}, sm_{major}{minor}"
        if torch.distributed.is_nccl_available():
            version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            table["NCCL"] = ".".join(map(str, version))
    if backend != "reference":
        table["triton"] = str(installed_version("triton"))
    table |= {"GEMM backend": backend, _LIBRARY: library or "torch"}
    if table[_LIBRARY] != "torch" and (loaded := cublaslt.cublaslt()) is not None:
        table[_CUBLASLT] = str(loaded.version)
    fields = {field.name: field for field in dataclasses.fields(config)}
    for name, value in config.as_dict().items():
        if name not in _LOCAL:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            table[flag(fields[name]).strip(" =")] = text
    if config.phases is not None and config.schedule != "auto":
        table["--snip-schedule"] = _digest(config.phases.to_json().encode())
    if config.map is not None:
        table["--snip-map"] = _digest(Path(config.map).read_bytes())
    return table


def _digest(content: bytes) -> str:
    return f"a file of sha256 {hashlib.sha256(content).hexdigest()[:12]}"


@functools.cache
def commit() -> str | None:
    """Return the commit of a checkout from which the package runs. None if it is installed.

    Git reads files of the checkout. One rank of each node is enough: the nodes may share their file system.
    """
    root = Path(snip_megatron.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def rank_device() -> AbstractContextManager[Any]:
    """Return a context in which the current CUDA device is the one that Megatron will choose for this rank."""
    import torch

    index = int(os.environ.get("LOCAL_RANK", "0"))
    exists = torch.cuda.is_available() and index < torch.cuda.device_count()
    return torch.cuda.device(index) if exists else nullcontext()


# -- how ranks tell each other ---------------------------------------------------------------------------------------
class Channel:
    """Exchanges JSON values between all ranks through a store. All ranks call each method."""

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self.rank, self._ranks, self._store, self._start = rank, ranks, store, time.monotonic()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix, self._shared = f"snip/{attempt}/{store.add(f'snip/{attempt}/{rank}', 1)}", 0

    def share(self, value: Any) -> Any:
        """Return rank 0's value."""
        self._shared += 1
        key = f"{self._prefix}/shared/{self._shared}"
        if self.rank == 0:
            self._store.set(key, json.dumps(value))
            return value
        try:
            return json.loads(self._store.get(key))
        except RuntimeError as error:  # of torch, also for a timeout
            raise SnipError(f"rank 0 cannot be reached, {self._waited}: {first_line(error)}") from error

    def collect(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks on rank 0, and None on the others."""
        keys = [f"{self._prefix}/{rank}" for rank in range(self._ranks)]
        self._store.set(keys[self.rank], json.dumps(value))
        if self.rank != 0:
            return None
        try:
            return [json.loads(text) for text in self._store.multi_get(keys)]
        except RuntimeError as error:
            missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            raise SnipError(f"rank {cut(', '.join(missing))} cannot be reached, {self._waited}") from error

    @property
    def _waited(self) -> str:
        return f"{time.monotonic() - self._start:.0f} s after this rank was ready"

    def leave(self) -> None:
        """Wait on rank 0 until the others have read what it shared, because the store may end with its process."""
        key, until = f"{self._prefix}/left", time.monotonic() + 10
        departed = self._store.add(key, 1)
        while self.rank == 0 and departed < self._ranks and time.monotonic() < until:
            time.sleep(0.01)
            departed = self._store.add(key, 0)


@functools.cache  # the store of rank 0 must live as long as its process, which the process group uses as well
def _store_of_launcher() -> Any:
    from torch.distributed.rendezvous import rendezvous

    return next(rendezvous("env://", timeout=_PATIENCE))[0]


def of_group() -> Channel | None:
    """Return a channel of the default process group. None if there is none, or if it has one rank or a fake backend."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    if not dist.is_initialized() or dist.get_world_size() < 2 or dist.get_backend() == "fake":
        return None
    return Channel(_get_default_store(), dist.get_rank(), dist.get_world_size())


def of_launcher() -> Channel | None:
    """Return a channel of the ranks that the launcher has started. None for one rank, or a fake process group."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks < 2 or "--fake-process-group" in sys.argv:
        return None
    return of_group() or Channel(_store_of_launcher(), int(os.environ["RANK"]), ranks)


# -- agreement -------------------------------------------------------------------------------------------------------
class _Report(NamedTuple):
    """What rank 0 learns of one rank."""

    host: str
    error: str  # why the rank cannot start. Empty if it can
    exit_code: int  # of the error
    table: Table


class _Verdict(NamedTuple):
    """What rank 0 decides about a start: an error of ``rank``, or with exit code 0 that all ranks use ``library``."""

    line: str = ""
    exit_code: int = 0
    rank: int = 0
    library: str = ""  # empty if each rank uses the one that it has loaded


def together[T](prepare: Callable[[], tuple[T, Terms]], channel: Channel | None, program: str = "snip") -> T:
    """Return the first result of ``prepare`` if it succeeds on all ranks and their terms are the same. Collective.

    Otherwise all ranks raise the same AgreedError, which rank 0 has printed as a line of ``program``. It names the
    first rank that failed, or the first that differs. The traceback of an error that is not a SnipError is printed on
    that rank. Without a channel, nothing is compared, and errors of ``prepare`` are raised as they are.
    """
    if channel is None:
        return prepare()[0]
    prepared: tuple[T, Terms] | None = None
    failure: Exception | None = None
    try:
        prepared = prepare()
    except Exception as error:
        failure = error
    terms = Terms({}) if prepared is None else prepared[1]
    code = failure.exit_code if isinstance(failure, SnipError) else 1
    reason = "" if failure is None else describe(failure)
    reports = channel.collect(_Report(socket.gethostname(), reason, code, terms.table))
    verdict = _Verdict()
    if reports is not None:
        verdict = _verdict([_Report(*each) for each in reports], settles=terms.use_library is not None)
        if verdict.exit_code:
            print(f"{program}: {verdict.line}", file=sys.stderr, flush=True)
        elif verdict.line:
            print(f"snip: {verdict.line}", flush=True)
    line, exit_code, rank, library = channel.share(verdict)
    if prepared is not None and not exit_code:
        if library and terms.use_library is not None:
            terms.use_library(library)
        return prepared[0]
    if failure is not None and not isinstance(failure, SnipError) and rank == channel.rank:
        traceback.print_exception(failure)
    channel.leave()
    raise AgreedError(line, exit_code=exit_code) from failure


def differences(table: Table, first: Table) -> dict[str, str]:
    """Return the fields of ``table`` that differ from ``first``, the table of rank 0. A missing field is "none"."""
    names = [n for n in dict.fromkeys((*first, *table)) if n not in WHERE_KNOWN or (n in first and n in table)]
    return {name: table.get(name, "none") for name in names if table.get(name) != first.get(name)}


def describe(error: Exception) -> str:
    """Return the message of a SnipError, and the type and the message of any other error."""
    return str(error) if isinstance(error, SnipError) else " ".join(f"{type(error).__name__}: {error}".split())


def _verdict(reports: Sequence[_Report], *, settles: bool) -> _Verdict:
    """Return why the ranks of ``reports`` do not start, or which library they use.

    ``settles`` says whether ranks with different libraries all use the slowest of them.
    """
    failed = [rank for rank, report in enumerate(reports) if report.error]
    if failed:
        report, line = reports[failed[0]], reports[failed[0]].error
        alike = len(failed) == len(reports) and len({each.error for each in reports}) == 1
        if not alike:  # otherwise the command line is wrong, and not a host
            line = f"rank {failed[0]} ({report.host}): {line}{_others('errors', reports, failed[1:])}"
        return _Verdict(line, report.exit_code, failed[0])
    first = reports[0].table
    differing = {rank: fields for rank, report in enumerate(reports) if (fields := differences(report.table, first))}
    if not differing:
        return _Verdict()
    if settles and all(fields.keys() == {_LIBRARY} for fields in differing.values()):
        rank = next(rank for rank, report in enumerate(reports) if report.table[_LIBRARY] != _FASTEST)
        where = f"rank {rank} ({reports[rank].host})"
        line = f"{_FASTEST} is switched off on all ranks, because {where} cannot load it: cuBLASLt multiplies"
        return _Verdict(line, 0, rank, "cublas")
    rank, *others = differing
    (name, value), *further = differing[rank].items()
    line = f"ranks differ: on rank {rank} ({reports[rank].host}) {name} is {value}, on rank 0 ({reports[0].host})"
    line += f" {first.get(name, 'none')}"
    if further:
        line += f"; {cut(', '.join(name for name, _ in further))} differ{'s' * (len(further) == 1)} too"
    return _Verdict(line + _others("differences", reports, others), EXIT_DISAGREEMENT, rank)


def _others(what: str, reports: Sequence[_Report], ranks: Sequence[int]) -> str:
    """Return a clause that counts the other ranks and names their hosts. Empty if there are none."""
    if not ranks:
        return ""
    hosts = list(dict.fromkeys(reports[rank].host for rank in ranks))
    names = ", ".join(hosts[:_NAMED_HOSTS]) + (", ..." if len(hosts) > _NAMED_HOSTS else "")
    return f"; {what} on {len(ranks)} other rank{'s' * (len(ranks) > 1)} too ({names})"


def on_rank_zero[T](make: Callable[[], T]) -> T | None:
    """Return the result of ``make`` on rank 0, and None on the others. Collective of the default process group.

    If ``make`` raises an error, all ranks raise an AgreedError as from :func:`together`.
    """
    import torch.distributed as dist

    works = not dist.is_initialized() or dist.get_rank() == 0
    return together(lambda: (make() if works else None, Terms({})), of_group())

"""The table of times of a run's own linears: kept with the run and in the user's cache, where later runs find it."""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from snip_megatron.precision import Format
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.run_data import TIMINGS
from snip_megatron.runtime.storage import write_atomically
from snip_megatron.timing.calibration import Workload, versions
from snip_megatron.timing.table import TimingTable

_DIGITS = 16  # of the hash in a cached file's name


def cache_folder() -> Path:
    """Return the folder of the user's cached tables. It need not exist."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~/.cache"))
    return base / "snip_megatron" / "timings"


def cached_tables(device: str) -> list[Path]:
    """Return the files of the user's cache with times of a GPU, given its name in torch."""
    return sorted(cache_folder().glob(f"{_slug(device)}-{'[0-9a-f]' * _DIGITS}.json"))


def _slug(device: str) -> str:
    return re.sub(r"\W+", "-", device.removeprefix("NVIDIA ")).lower()


@dataclass(frozen=True)
class OwnTable:
    """Where the table of a run's linears is kept, and what it must hold: times of a GPU, given its name in torch, by a
    GEMM backend, in quantised formats, for the sizes of the workload. ``run`` is the run directory, if there is one,
    and ``products`` the library of the backend that multiplies.
    """

    device: str
    backend: str
    formats: tuple[Format, ...]
    workload: Workload
    run: Path | None = None
    products: str = ""

    @property
    def cached(self) -> Path:
        """The file of the user's cache, whose name depends on all that this table must hold, and on versions."""
        by = self.backend, self.products
        asked = repr((self.device, sorted(versions().items()), by, self.formats, self.workload))
        return cache_folder() / f"{_slug(self.device)}-{hashlib.sha256(asked.encode()).hexdigest()[:_DIGITS]}.json"

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files in the order in which they are looked for: the run's own, so that a resume has equal times."""
        return (self.cached,) if self.run is None else (self.run / TIMINGS, self.cached)

    def find(self) -> tuple[TimingTable, Path] | None:
        """Return the kept table of these linears, and its file. None if there is none, or none that can be read.

        One from the cache is stored with the run too: the cache of a later release has another one.
        """
        for path in self.paths:
            if not path.exists():
                continue
            try:
                table = TimingTable.load(path)
            except SnipError as error:
                print(f"snip: {error}; it is measured again", flush=True)
                continue
            if self.suffices(table):
                if self.run is not None and path == self.cached:
                    _write(self.run / TIMINGS, table)
                return table, path
        return None

    def keep(self, table: TimingTable) -> list[Path]:
        """Write the table with the run and into the cache. Returns the files; one that cannot be written is named."""
        return [path for path in self.paths if _write(path, table)]

    def suffices(self, table: TimingTable) -> bool:
        """Return whether the table is of this card and backend, and holds all formats and sizes of linears."""
        return (
            (table.device, table.backend) == (self.device, self.backend)
            and set(self.formats) <= set(table.formats)
            and set(self.workload.gemms) <= set(table.gemms)
            and set(self.workload.activations) <= set(table.activations)
            and set(self.workload.weights) <= set(table.weights)
            and set(self.workload.grouped) <= set(table.grouped)
        )


def _write(path: Path, table: TimingTable) -> bool:
    """Return whether the file could be written."""
    try:
        write_atomically(path, table.to_json().encode())
    except OSError as error:
        print(f"snip: {path}: the times of GEMMs cannot be kept there: {error.strerror}", flush=True)
        return False
    return True

"""The times of a run's own linears, stored in the run directory and in the user's cache."""

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from snip_megatron.precision import Format
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.run_data import TIMINGS
from snip_megatron.runtime.storage import Writer, write_atomically
from snip_megatron.timing.calibration import Workload, versions
from snip_megatron.timing.table import TimingTable

_DIGITS = 16  # of the hash in a cached file's name


def cache_folder() -> Path:
    """Return the folder of the user's cached tables. It need not exist."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if os.path.isabs(configured) else Path(os.path.expanduser("~/.cache"))
    return base / "snip_megatron" / "timings"


def cached_tables(device: str) -> list[Path]:
    """Return the files of the user's cache with times of a GPU, given its name in torch."""
    return sorted(cache_folder().glob(f"{_slug(device)}-{'[0-9a-f]' * _DIGITS}.json"))


def _slug(device: str) -> str:
    return re.sub(r"\W+", "-", device.removeprefix("NVIDIA ")).lower()


@dataclass(frozen=True)
class RunTimings:
    """The files of a run's timing table, and what the table must hold.

    Attributes:
        device: Name of the GPU in torch.
        backend: GEMM backend.
        formats: Quantised formats.
        workload: Sizes of the run's GEMMs.
        run: The run directory. None if there is none.
        library: The backend's library for products.
        writer: Writes the files of a table that was measured during training. If it is None, they are written at once.
    """

    device: str
    backend: str
    formats: tuple[Format, ...]
    workload: Workload
    run: Path | None = None
    library: str = ""
    writer: Writer | None = None

    @property
    def cache_file(self) -> Path:
        """The file in the user's cache. Its name depends on what the table must hold, and on versions."""
        key = repr((self.device, sorted(versions().items()), (self.backend, self.library), self.formats, self.workload))
        return cache_folder() / f"{_slug(self.device)}-{hashlib.sha256(key.encode()).hexdigest()[:_DIGITS]}.json"

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files in the order of reading. The run's own comes first, so that a resume has equal times."""
        return (self.cache_file,) if self.run is None else (self.run / TIMINGS, self.cache_file)

    def load(self) -> tuple[TimingTable, Path] | None:
        """Return the stored table and its file. None if there is none that can be read.

        A table from the cache is stored in the run directory too, because a later release has another cache.
        """
        for path in self.paths:
            if not path.exists():
                continue
            try:
                table = TimingTable.load(path)
            except SnipError as error:
                print(f"snip: {error}; it is measured again", flush=True)
                continue
            if self.covers(table):
                if self.run is not None and path == self.cache_file:
                    self._write(self.run / TIMINGS, table)
                return table, path
        return None

    def store(self, table: TimingTable) -> list[Path]:
        """Write the table to the run directory and the cache. Returns the files that are or will be written."""
        return [path for path in self.paths if self._write(path, table)]

    def _write(self, path: Path, table: TimingTable) -> bool:
        """Write a table. Prints a line and returns False if it cannot be written."""
        write: Callable[[Path, bytes], None] = write_atomically if self.writer is None else self.writer.replace
        try:
            write(path, table.to_json().encode())
        except OSError as error:
            print(f"snip: {path}: the times of GEMMs cannot be kept there: {error.strerror}", flush=True)
            return False
        return True

    def covers(self, table: TimingTable) -> bool:
        """Return whether the table is of this card and backend, and holds all formats and sizes of linears."""
        return (
            (table.device, table.backend) == (self.device, self.backend)
            and set(self.formats) <= set(table.formats)
            and set(self.workload.gemms) <= set(table.gemms)
            and set(self.workload.activations) <= set(table.activations)
            and set(self.workload.weights) <= set(table.weights)
            and set(self.workload.grouped) <= set(table.grouped)
        )

"""Columns of the table with the results of forcing each option alone (docs/method.md, estimator ``measured``).

NumPy only: the sidecar and ``snip validate-proxy`` read the table without torch.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MEASURED_COLUMNS = (
    "loss",  # mean token loss with the option minus that without it, nats; fprop only, 0 elsewhere
    "first_order",  # ⟨G, E⟩ on the same tokens: part of ``loss``, with mean 0 over batches; fprop only
    "loss_floor",  # |change of the loss| by a nudge in the same layer, which is rounding noise; fprop only
    "drift",  # Σ_j ‖u(g_j + δ_j) − u(g_j)‖/‖W_j‖ over linears and sinks, minus the floor of each in quadrature
    "raw_drift",  # the same without subtracting the floor
    "floor",  # the same for a nudge: rounding noise of the training dtype; 0 for wgrad, which has none
    "variance",  # added gradient variance relative to the gradient's own (``weight_divergence.added_variance``)
    "step",  # the step before which it was measured; -1: never
)
"""One value per option: float64 [linears, 3 GEMMs, formats]."""

SIGNED = ("loss", "first_order", "step")
"""Columns that may be negative."""

NEVER = -1.0

# Exceptions of NumPy, zipfile and the conversions of a header on bytes that are no such file: RuntimeError for
# encryption and unknown compression, MemoryError and OverflowError for impossible sizes.
UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    EOFError,
    RuntimeError,
    MemoryError,
    OverflowError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True)
class Measured:
    """The measured columns of one table.

    Attributes:
        columns: every name of :data:`MEASURED_COLUMNS` → float64 [linears, 3, formats].
        formats: names of the formats, the last axis.
    """

    columns: Mapping[str, NDArray[np.float64]]
    formats: tuple[str, ...]

    @classmethod
    def nothing(cls, linears: int, formats: tuple[str, ...]) -> Measured:
        """Return columns in which no option is measured."""
        columns = {name: np.zeros((linears, 3, len(formats))) for name in MEASURED_COLUMNS}
        columns["step"][:] = NEVER
        return cls(columns, formats)

    def __getitem__(self, column: str) -> NDArray[np.float64]:
        return self.columns[column]

    @property
    def known(self) -> NDArray[np.bool_]:
        """Which options have been measured, bool [linears, 3, formats]."""
        return np.asarray(self.columns["step"] > NEVER)

    def renewed(self, newer: Measured) -> Measured:
        """Return a copy in which what ``newer`` measured replaces the old values. Both have the same formats."""
        known = newer.known
        columns = {name: np.where(known, newer[name], self[name]) for name in MEASURED_COLUMNS}
        return Measured(columns, self.formats)

    def fits(self, linears: int, formats: tuple[str, ...]) -> bool:
        """Whether the columns have this number of linears and these formats."""
        return self.formats == formats and len(self.columns["step"]) == linears

    def check(self, linears: int, formats: tuple[str, ...]) -> None:
        """Raise ValueError unless the columns have this number of linears and these formats."""
        if self.formats != formats:
            raise ValueError(f"measured in {', '.join(self.formats)}, expected {', '.join(formats)}")
        shape = (linears, 3, len(formats))
        for name in MEASURED_COLUMNS:
            array = self.columns[name]
            if array.shape != shape or array.dtype != np.float64:
                raise ValueError(f"measured {name}: {array.dtype}{array.shape}, expected float64{shape}")

    def to_bytes(self) -> bytes:
        """Return the contents of a .npz file without pickles."""
        buffer = io.BytesIO()
        names = np.array(self.formats, dtype=np.str_)
        np.savez(buffer, formats=names, **self.columns)  # type: ignore[arg-type]
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> Measured:
        """Read :meth:`to_bytes`. Raises ValueError on anything else; never unpickles."""
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as data:
                found = cls({c: data[c] for c in MEASURED_COLUMNS}, tuple(str(f) for f in data["formats"]))
        except UNREADABLE as error:
            raise ValueError(f"not measured columns ({error})") from None
        found.check(len(found.columns["step"]), found.formats)
        return found
